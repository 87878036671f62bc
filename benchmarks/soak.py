"""Do memory and open descriptors of a service grow while it serves for long?

The service is ``gmmvit serve --gateway --state`` with all its parts. Clients send tensors over gRPC and HTTP, on kept
and new connections, PNG images to the ensemble and to POST /classify, and requests that the gateway refuses. Every few
seconds the script reads memory (proportional set size without mapped files) and open descriptors of every process.

After the warm-up, a fifth of the time and at most ten minutes, a line is fitted to each series. The growth must be
within its limit with 95 % confidence, 8 MiB or 5 % of the memory and 4 descriptors; otherwise the result is INVALID and
the exit status 1, as after a lost request, a wrong answer or a restart.

    python benchmarks/soak.py [--minutes 60] [--rate 60] [--check] [--output RESULT]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared import run_card
from benchmarks.shared.growth import Sampler, grown
from benchmarks.shared.mixed_load import EXPECTED, MixedLoad
from benchmarks.shared.open_loop import KEY
from benchmarks.shared.options import parsed, script_parser
from gmmvit_deploy.bundle.artifacts import Bundle
from tests.random_bundles import bundle_of, random_vit
from tests.serving.rollout.checked_load import KINDS, CheckedLoad
from tests.serving.rollout.state_service import StateService

MAX_BODY_BYTES = 1_000_000
WARM_UP_SHARE, LONGEST_WARM_UP_S = 0.2, 600.0
"""The front keeps each closed connection until its timer ends (75 s) and Python's collector runs: its memory grew by
7.7 KiB a request for about 2,000 requests, and then stayed."""
PARTS = ("gmmvit serve", "tritonserver", "worker gmmvit_network", "worker gmmvit_preprocess", "haproxy", "front")
"""The kinds of processes of a service.  Without one of them, the run would show nothing about it."""
_SHOWN = 20
_PROGRESS_S = 60.0
_MIN_SAMPLES, _LONGER = 30, 10
"""A run on a busy machine goes on until it has these samples, at most ten times as long as it should."""


def measured(
    service: StateService, bundle: Bundle, *, seconds: float, rate: float, key: str, max_body_bytes: int
) -> dict[str, Any]:
    """Send ``rate`` tensors a second for some seconds; return the counts and the growth of every kind of process."""
    pixels, logits = bundle.golden()
    where = service.where
    tensors = CheckedLoad(where["grpc"], where["http"], key, pixels, {bundle.sha256: logits}, rate, clients=1)
    mixed = MixedLoad(where=where, key=key, bundle=bundle, max_body_bytes=max_body_bytes)
    warm_up_s = min(LONGEST_WARM_UP_S, WARM_UP_SHARE * seconds)
    started = time.monotonic()
    with Sampler(service.process.pid, interval_s=min(5.0, seconds / 40)) as sampler, tensors, mixed:
        while (left := started + seconds - time.monotonic()) > 0 or (
            len(sampler.times) < _MIN_SAMPLES and left > -_LONGER * seconds
        ):
            time.sleep(max(0.5, min(left, _PROGRESS_S)))
            print(
                f"{time.monotonic() - started:.0f} s: {tensors.total} tensors, {mixed.sent.total()} others", flush=True
            )
    return {
        "requests": dict(tensors.sent + mixed.sent),
        "lost": len(tensors.lost),
        "wrong": len(tensors.wrong),
        "unexpected": len(mixed.unexpected),
        "examples": [*tensors.lost[:_SHOWN], *tensors.wrong[:_SHOWN], *mixed.unexpected[:_SHOWN]],
        "warm_up_s": warm_up_s,
        "measured_s": sampler.times[-1] - started - warm_up_s,
        "processes": {kind: len(pids) for kind, pids in sorted(sampler.processes.items())},
        "growth": sampler.growths(after=started + warm_up_s),
        "series": {
            "seconds": [round(moment - started, 1) for moment in sampler.times],
            "memory_mib": {kind: [round(value, 1) for value in values] for kind, values in sampler.memory.items()},
            "descriptors": sampler.descriptors,
        },
    }


def problems(result: Mapping[str, Any]) -> list[str]:
    """Return what a service promises and did not keep, what the run did not show, and what grew."""
    return broken_promises(result) + grown(result["growth"])


def broken_promises(result: Mapping[str, Any]) -> list[str]:
    """Return what a service promises and did not keep, and what the run did not show."""
    reasons = [f"{result[kind]} requests were {kind}" for kind in ("lost", "wrong") if result[kind]]
    if result["unexpected"]:
        reasons.append(f"{result['unexpected']} requests got another status than expected")
    reasons += [
        f"no request of kind {kind} was sent" for kind in (*KINDS, *EXPECTED) if not result["requests"].get(kind)
    ]
    reasons += [f"no process {part} was sampled" for part in PARTS if part not in result["processes"]]
    # The preprocessing model has several workers from the start, so a restart of a worker shows as a problem elsewhere.
    for part in ("tritonserver", "haproxy", "front"):
        if result["processes"].get(part, 1) > 1:
            reasons.append(f"{part} was started {result['processes'][part]} times")
    return reasons


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=60.0)
    arguments = parsed(parser, minutes=0.1)
    settings = {"minutes": arguments.minutes, "rate": arguments.rate, "max_body_bytes": MAX_BODY_BYTES}
    card = run_card.written(arguments.output, Path(__file__).name, timed=False, **settings)
    with card as results, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = bundle_of(random_vit(depth=3), folder)
        (folder / "keys").write_text(f"benchmark {KEY}\n", encoding="utf-8")
        limit = ("--max-body", str(MAX_BODY_BYTES))
        with StateService(folder, folder / "keys", str(bundle.path), *limit) as service:
            chosen = {"rate": arguments.rate, "key": KEY, "max_body_bytes": MAX_BODY_BYTES}
            results |= measured(service, bundle, seconds=60 * arguments.minutes, **chosen)
        results["problems"] = problems(results)
        print("\n".join([str(results["requests"]), *results["examples"]]))
        for kind, quantities in results["growth"].items():
            for name, each in quantities.items():
                interval = f"{each.growth:.2f} ({each.low:.2f} to {each.high:.2f})"
                print(f"{kind}, {name}: mean {each.mean:.1f}, grew by {interval}")
    if broken_promises(results) or (results["problems"] and not arguments.check):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
