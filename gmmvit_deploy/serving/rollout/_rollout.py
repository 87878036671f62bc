"""Roll out a bundle for a model of a service: the steps, in order.

A failed step and an abort end the new server; the old server was never away. The new server has the other models too.

open → contract → copy → start the new server beside the old → golden answers
     → labels of the user's images → all of the traffic → record → end the old server
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import GmmvitError, InputError, ServerError
from gmmvit_deploy.serving.names import DEFAULT_AGREEMENT
from gmmvit_deploy.serving.rollout._blue_green import BlueGreen
from gmmvit_deploy.serving.rollout._checks import (
    contract_changes,
    require_golden_answers,
    require_same_contract,
    require_same_labels,
)
from gmmvit_deploy.serving.rollout._state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Options of a rollout.

    images: images that both servers classify before the new server gets traffic; empty leaves this out.
    agreement: the smallest share of these images with the same label from both servers.
    allow_contract_change: True permits other labels, another input and a smaller batch.
    Errors: InputError when ``agreement`` is not between 0 and 1.
    """

    images: Sequence[Path] = field(default=())
    agreement: float = DEFAULT_AGREEMENT
    allow_contract_change: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.agreement <= 1.0:
            likely = self.agreement / 100 if 1 < self.agreement <= 100 else DEFAULT_AGREEMENT
            raise InputError(
                f"--agreement: expected a share from 0 to 1, got {self.agreement:g}",
                hint=f"type --agreement {likely:g}",
            )


def served_name(name: str | None, served: Collection[str]) -> str:
    """Return the name of the model to replace: ``name``, or None for the only model.

    Errors: InputError that states the names when the service has no such model, or several and ``name`` is None.
    """
    names = ", ".join(sorted(served))
    if name is None and len(served) > 1:
        raise InputError(f"the service has several models: {names}", hint=f"add --name with one of {names}")
    if name is not None and name not in served:
        raise InputError(
            f"the service has no model {name}, only {names}",
            hint=f"type --name with one of {names}; a service gets other models by a start with a new state folder",
        )
    return name or next(iter(served))


def roll_out(
    name: str,
    path: Path,
    servers: BlueGreen,
    state: State,
    options: RolloutOptions,
    *,
    report: Callable[[str], None],
    aborted: Callable[[], bool],
) -> Bundle:
    """Replace the bundle of the model ``name`` by the bundle at ``path``, and return the new bundle.

    report: called with a sentence for each step.  aborted: True as soon as the rollout must end.
    Errors, each of which leaves the old server with all of the traffic:
        BundleError: ``path`` is no bundle, or a damaged bundle.
        InputError: clients would notice a change, or the bundle is served already.
        ServerError: the new server does not start, gives other answers, or the rollout was aborted.
        OutputError: the state folder cannot be written.
    """
    bundle = open_bundle(path)
    old = servers.served[name]
    if bundle.sha256 == old.sha256:
        raise InputError(
            f"{path}: the service serves this bundle already ({bundle.sha256[:12]})",
            hint=f"type gmmvit rollout with another bundle; gmmvit rollout --status --to {state.folder} prints the "
            "path of the previous bundle",
        )
    if options.allow_contract_change:
        for change in contract_changes(old.manifest, bundle.manifest):
            report(f"contract change: {change}")
    else:
        require_same_contract(old, bundle)
    report(f"copy bundle {bundle.sha256[:12]}")
    copied = state.copy_of(name, bundle)
    bundles = {**servers.served, name: copied}

    def go_on() -> None:
        if aborted():
            raise ServerError("the rollout was aborted", hint="the old server has all of the traffic")
        if death := servers.death_of_new():
            raise _died(death)

    report("start the new server beside the old server")
    try:
        servers.start_new(bundles, aborted)
        go_on()
        report(require_golden_answers(copied, name, servers.urls()[1], go_on))
        if options.images:
            report(require_same_labels(options.images, name, *servers.urls(), options.agreement, go_on))
        go_on()
        report("all traffic to the new server")
        servers.switch()
        go_on()
        state.promote(bundles)
    except BaseException as exc:
        death = servers.death_of_new()
        report(f"go back to bundle {old.sha256[:12]}")
        servers.end_new()
        if death and isinstance(exc, GmmvitError):
            raise _died(death) from exc
        raise
    report("end the old server when its requests are answered")
    try:
        servers.end_old()
    except GmmvitError as exc:  # the old server has ended, and all requests go to the new server
        report(f"the gateway keeps the settings of the rollout: {exc}")
    return copied


def _died(death: str) -> ServerError:
    return ServerError(
        f"the new server ended during the rollout: {death}",
        hint="the old server has all of the traffic; see the service's log for the last lines of the new server",
    )
