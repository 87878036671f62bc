"""Roll out a bundle: the steps, in order. A failed step and an abort end the new server; the old server was never away.

open → contract → copy → start the new server beside the old → golden answers
     → labels of the user's images → all of the traffic → record → end the old server
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import GmmvitError, InputError, ServerError
from gmmvit_deploy.serving.names import DEFAULT_AGREEMENT
from gmmvit_deploy.serving.rollout.answers import label_agreement, require_golden_answers
from gmmvit_deploy.serving.rollout.contract import contract_changes, require_same_contract
from gmmvit_deploy.serving.rollout.state import State

__all__ = ["Backends", "RolloutOptions", "roll_out"]

_SHOWN = 5
"""The number of images with different labels that an error lists."""


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


class Backends(Protocol):
    """The servers of a service: the old server, and during a rollout the new server beside it."""

    @property
    def served(self) -> Bundle:
        """The bundle of the old server."""

    def start_new(self, bundle: Bundle, aborted: Callable[[], bool]) -> None:
        """Start the new server, without traffic, and wait until it is ready.  Errors: ServerError."""

    def urls(self) -> tuple[str, str]:
        """Return the gRPC URLs of the old and of the new server."""

    def switch(self) -> None:
        """Send all new requests to the new server."""

    def death_of_new(self) -> str:
        """Return why the new server is dead; empty while it lives."""

    def require_serving(self) -> None:
        """Wait until the gateway passes requests to the new server.  Errors: ServerError when it does not."""

    def end_old(self) -> None:
        """End the old server when its requests are answered; the new server takes its place."""

    def end_new(self) -> None:
        """End the new server when its requests are answered; the old server gets all new requests."""


def roll_out(
    path: Path,
    backends: Backends,
    state: State,
    options: RolloutOptions,
    *,
    report: Callable[[str], None],
    aborted: Callable[[], bool],
) -> Bundle:
    """Replace the served bundle by the bundle at ``path``, and return the new bundle.

    report: called with a sentence for each step.  aborted: True as soon as the rollout must end.
    Errors, each of which leaves the old server with all of the traffic:
        BundleError: ``path`` is no bundle, or a damaged bundle.
        InputError: clients would notice a change, or the bundle is served already.
        ServerError: the new server does not start, gives other answers, or the rollout was aborted.
        OutputError: the state folder cannot be written.
    """
    bundle = open_bundle(path)
    old = backends.served
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
    copied = state.copy_of(bundle)

    def go_on() -> None:
        _require_not(aborted)
        if death := backends.death_of_new():
            raise _died(death)

    report("start the new server beside the old server")
    try:
        backends.start_new(copied, aborted)
        go_on()
        report(require_golden_answers(copied, backends.urls()[1], go_on))
        _compare_labels(backends, options, report, go_on)
        go_on()
        report("all traffic to the new server")
        backends.switch()
        backends.require_serving()
        go_on()
        state.promote(copied)
    except BaseException as exc:
        death = backends.death_of_new()
        report(f"go back to bundle {old.sha256[:12]}")
        backends.end_new()
        if death and isinstance(exc, GmmvitError):
            raise _died(death) from exc
        raise
    report("end the old server when its requests are answered")
    try:
        backends.end_old()
    except GmmvitError as exc:  # the old server has ended, and all requests go to the new server
        report(f"the gateway keeps the settings of the rollout: {exc}")
    return copied


def _compare_labels(
    backends: Backends, options: RolloutOptions, report: Callable[[str], None], go_on: Callable[[], None]
) -> None:
    if not options.images:
        return
    least = options.agreement
    agreement = label_agreement(options.images, *backends.urls(), go_on)
    same = agreement.images - len(agreement.differing)
    report(f"images: both servers give the same label to {same} of {agreement.images}")
    if agreement.share < least:
        shown = "".join(f"\n  {line}" for line in agreement.differing[:_SHOWN])
        if more := len(agreement.differing[_SHOWN:]):
            shown += f"\n  and {more} more"
        raise ServerError(
            f"the new server gives the same label as the old server to {agreement.share:.1%} of the images, "
            f"expected at least {least:.1%} (FILE: label of the old server → label of the new server):{shown}",
            hint="look at the images with other labels; if the new labels are right, repeat with a smaller --agreement",
        )


def _died(death: str) -> ServerError:
    return ServerError(
        f"the new server ended during the rollout: {death}",
        hint="the old server has all of the traffic; see the service's log for the last lines of the new server",
    )


def _require_not(aborted: Callable[[], bool]) -> None:
    if aborted():
        raise ServerError("the rollout was aborted", hint="the old server has all of the traffic")
