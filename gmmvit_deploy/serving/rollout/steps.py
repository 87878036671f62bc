"""Roll out a bundle: the steps, in order. A failed step and an abort end the new server; the old server was never away.

open → contract → copy → start the new server beside the old → golden answers
     → labels of the canary images → a share of the traffic → all of the traffic → record → end the old server
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import GmmvitError, InputError, ServerError
from gmmvit_deploy.serving.rollout.answers import label_agreement, require_golden_answers
from gmmvit_deploy.serving.rollout.canary import CanaryOptions, Counts, canary_verdict
from gmmvit_deploy.serving.rollout.contract import contract_changes, require_same_contract
from gmmvit_deploy.serving.rollout.state import State

__all__ = ["Backends", "RolloutOptions", "roll_out"]

_POLL_S = 0.2
_SHOWN = 5
"""The number of images with different labels that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Options of a rollout.

    canary: the share of the traffic and the comparison before all traffic goes to the new server; None leaves them out.
    canary_images: images that both servers classify before the new server gets traffic; empty leaves this out.
    agreement: the smallest share of these images with the same label from both servers.
    allow_contract_change: True permits other labels, another input and a smaller batch.
    """

    canary: CanaryOptions | None = None
    canary_images: Sequence[Path] = field(default=())
    agreement: float = 0.95
    allow_contract_change: bool = False


class Backends(Protocol):
    """The servers of a service: the old server, and during a rollout the new server beside it."""

    @property
    def served(self) -> Bundle:
        """The bundle of the old server."""

    def start_new(self, bundle: Bundle, aborted: Callable[[], bool]) -> None:
        """Start the new server, without traffic, and wait until it is ready.  Errors: ServerError."""

    def urls(self) -> tuple[str, str]:
        """Return the gRPC URLs of the old and of the new server."""

    def counts(self) -> tuple[Counts, Counts]:
        """Return what clients got from the old and from the new server since the last `share`."""

    def share(self, new: float) -> None:
        """Send the share ``new`` of new requests to the new server, and the rest to the old server."""

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
        ServerError: the new server does not start, gives other answers, fails its canary, or the rollout was aborted.
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
        if options.canary is not None:
            _run_canary(backends, options.canary, report, go_on)
        go_on()
        report("all traffic to the new server")
        backends.share(1.0)
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
    if not options.canary_images:
        return
    least = options.agreement
    agreement = label_agreement(options.canary_images, *backends.urls(), go_on)
    same = agreement.images - len(agreement.differing)
    report(f"canary images: both servers give the same label to {same} of {agreement.images}")
    if agreement.share < least:
        shown = "".join(f"\n  {line}" for line in agreement.differing[:_SHOWN])
        if more := len(agreement.differing[_SHOWN:]):
            shown += f"\n  and {more} more"
        raise ServerError(
            f"the new server gives the same label as the old server to {agreement.share:.1%} of the canary images, "
            f"expected at least {least:.1%} (FILE: label of the old server → label of the new server):{shown}",
            hint="look at the images with other labels; if the new labels are right, repeat with a smaller "
            "--canary-agreement",
        )


def _run_canary(
    backends: Backends, options: CanaryOptions, report: Callable[[str], None], go_on: Callable[[], None]
) -> None:
    """Give the new server its share until it has answered enough requests, then compare.  Errors: ServerError."""
    report(
        f"{100 * options.share:.3g}% of the traffic to the new server until it has answered {options.requests} requests"
    )
    backends.share(options.share)
    deadline = time.monotonic() + options.timeout_s
    while True:
        time.sleep(_POLL_S)
        go_on()
        old, new = backends.counts()
        if new.answered + new.failed >= options.requests:
            break
        if time.monotonic() > deadline:
            raise ServerError(
                f"the new server got {new.answered + new.failed} requests in {options.timeout_s:g} s, expected at "
                f"least {options.requests} for a verdict",
                hint="repeat with a larger --canary, a smaller --canary-requests or a longer --canary-timeout",
            )
    verdict = canary_verdict(old, new, options)
    for reason in verdict.reasons:
        report(reason)
    if not verdict.good:
        raise ServerError(
            "the canary failed: " + "; ".join(verdict.reasons),
            hint="the old server has all of the traffic again; see the service's log for the errors of the new server",
        )


def _died(death: str) -> ServerError:
    return ServerError(
        f"the new server ended during the rollout: {death}",
        hint="the old server has all of the traffic; see the service's log for the last lines of the new server",
    )


def _require_not(aborted: Callable[[], bool]) -> None:
    if aborted():
        raise ServerError("the rollout was aborted", hint="the old server has all of the traffic")
