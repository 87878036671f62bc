"""Does a service lose a request, or give a wrong answer, while bundles are rolled out under load?

The service is ``gmmvit serve --gateway --state``. Clients send requests over gRPC and HTTP, on kept and on new
connections, at half of their closed-loop rate, while bundles of ViT are rolled out in sequence. Every answer is
compared with the logits of the bundle that it states.

    first, second   three blocks, nearly the same weights: each must be promoted in place of the other
    decisions       three blocks, other weights: its labels of the compared images differ, so it must be refused

A lost request, a wrong answer and an unexpected outcome of a rollout make the result INVALID and the exit status 1.

    python benchmarks/rollout.py [--requests 100000] [--rollouts 10] [--check] [--output RESULT]
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.shared import run_card
from benchmarks.shared.open_loop import KEY
from benchmarks.shared.options import parsed, script_parser
from gmmvit_deploy.bundle.artifacts import Bundle
from tests.random_bundles import bundle_of, fine_tuned, random_vit
from tests.serving.rollout.checked_load import KINDS, CheckedLoad
from tests.serving.rollout.state_service import StateService

DEPTH = 3
IMAGES = 40
REFUSED = {"decisions": "the same label as the old server"}
"""Bundle that must be refused → a part of the reason."""
_SHOWN = 20
"""The number of lost and of wrong requests that the result describes."""
_DISTINCT = 1e-3
"""The least distance of the logits of two bundles, as a share of the largest logit; `CheckedLoad` allows 1e-4."""
_PROGRESS_S = 15.0


def plan(count: int) -> list[str]:
    """Return the bundles of ``count`` rollouts in order; the service starts with the bundle ``first``."""
    good = ("second", "first")
    return ["decisions" if index % 3 == 1 else good[(index - (index + 1) // 3) % 2] for index in range(count)]


def written_bundles(folder: Path, names: Collection[str]) -> dict[str, Bundle]:
    """Export the bundles of these names.  Errors: SystemExit when wrong and right answers cannot be distinguished."""
    models = {
        "first": random_vit(depth=DEPTH),
        "second": fine_tuned(random_vit(depth=DEPTH), share=0.01),
        "decisions": random_vit(depth=DEPTH, seed=7),
    }
    bundles = {name: bundle_of(models[name], folder, name=name) for name in names}
    logits = {name: bundle.golden()[1] for name, bundle in bundles.items()}
    for name, values in logits.items():
        for other in logits.keys() - {name}:
            distance = (np.abs(values - logits[other]).max(axis=1) / np.abs(values).max(axis=1)).min()
            if distance < _DISTINCT:
                raise SystemExit(f"the logits of {name} and {other} differ by {distance:.2g} of the largest logit only")
    return bundles


def written_images(folder: Path) -> list[str]:
    generator = np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(IMAGES)]
    for path in paths:
        Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return [str(path) for path in paths]


def load_of(service: StateService, bundles: Mapping[str, Bundle], rate: float) -> CheckedLoad:
    return CheckedLoad(
        grpc_url=service.where["grpc"],
        http_url=service.where["http"],
        key=KEY,
        pixels=bundles["first"].golden()[0],
        expected={bundle.sha256: bundle.golden()[1] for bundle in bundles.values()},
        rate=rate,
    )


def capacity(service: StateService, bundles: Mapping[str, Bundle], seconds: float) -> float:
    """Return the requests a second of the clients in closed loop."""
    with load_of(service, bundles, rate=1e9) as load:
        time.sleep(1.0)
        before, started = load.total, time.monotonic()
        time.sleep(seconds)
        return (load.total - before) / (time.monotonic() - started)


def rolled_out(
    name: str, service: StateService, load: CheckedLoad, bundles: Mapping[str, Bundle], images: list[str]
) -> dict[str, Any]:
    """Roll out a bundle, and return the outcome.  answers: of the service during the rollout, by bundle."""
    before, total, started = Counter(load.answered), load.total, time.monotonic()
    event = service.order(bundle=str(bundles[name].path), images=images)
    row = {
        "bundle": name,
        "expected": "refused" if name in REFUSED else "promoted",
        "outcome": "promoted" if "done" in event else "refused",
        "reason": event.get("error", ""),
        "seconds": round(time.monotonic() - started, 1),
        "requests": load.total - total,
        "answers": by_bundle(Counter(load.answered) - before, bundles),
    }
    print(
        f"rollout of {name}: {row['outcome']} after {row['seconds']} s; {row['reason'] or row['answers']}", flush=True
    )
    return row


def by_bundle(answered: Mapping[str, int], bundles: Mapping[str, Bundle]) -> dict[str, int]:
    names = {bundle.sha256: name for name, bundle in bundles.items()}
    return {names.get(sha256, "unknown"): count for sha256, count in answered.items() if count}


def wait_for(load: CheckedLoad, requests: int) -> None:
    """Wait until the clients have sent so many requests, and print what they got."""
    shown = time.monotonic()
    while load.total < requests:
        time.sleep(0.1)
        if time.monotonic() - shown > _PROGRESS_S:
            shown = time.monotonic()
            print(f"{load.total} requests, {len(load.lost)} lost, {len(load.wrong)} wrong", flush=True)


def measured(
    service: StateService, bundles: Mapping[str, Bundle], requests: int, rollouts: int, closed_loop_s: float
) -> dict[str, Any]:
    images = written_images(service.folder)
    highest = capacity(service, bundles, closed_loop_s)
    print(f"capacity: {highest:.0f} requests a second in closed loop", flush=True)
    started, rows = time.monotonic(), []
    with load_of(service, bundles, rate=highest / 2) as load:
        for number, name in enumerate(plan(rollouts)):
            wait_for(load, requests * number // rollouts)
            rows.append(rolled_out(name, service, load, bundles, images))
        wait_for(load, requests)
    seconds = time.monotonic() - started
    return {
        "capacity_per_second": highest,
        "requests_per_second": load.total / seconds,
        "requests": load.total,
        "by_kind": dict(load.sent),
        "by_bundle": by_bundle(load.answered, bundles),
        "lost": len(load.lost),
        "wrong": len(load.wrong),
        "examples": [*load.lost[:_SHOWN], *load.wrong[:_SHOWN]],
        "rollouts": rows,
    }


def problems(result: Mapping[str, Any], requests: int) -> list[str]:
    """Return what a service promises and did not keep, and what the run did not show."""
    reasons = [f"{result[kind]} requests were {kind}" for kind in ("lost", "wrong") if result[kind]]
    if result["requests"] < requests:
        reasons.append(f"{result['requests']} requests were sent, expected {requests}")
    reasons += [f"no request of kind {kind} was sent" for kind in KINDS if not result["by_kind"].get(kind)]
    for number, row in enumerate(result["rollouts"], start=1):
        name = row["bundle"]
        if row["outcome"] != row["expected"]:
            reasons.append(f"rollout {number}, {name}: {row['outcome']}, expected {row['expected']}: {row['reason']}")
        elif REFUSED.get(name, "") not in row["reason"]:
            reasons.append(f"rollout {number}, {name}: refused for another reason: {row['reason']}")
        elif name != "decisions" and not row["answers"].get(name):
            reasons.append(f"rollout {number}, {name}: the bundle answered no request")
    return reasons


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--closed-loop", type=float, default=10.0, metavar="SECONDS", help="time of the closed loop")
    arguments = parsed(parser, requests=500, rollouts=1, closed_loop=2.0)
    settings = {"requests": arguments.requests, "rollouts": arguments.rollouts, "depth": DEPTH, "images": IMAGES}
    card = run_card.written(arguments.output, Path(__file__).name, timed=False, **settings)
    with card as results, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundles = written_bundles(folder, dict.fromkeys(("first", *plan(arguments.rollouts))))
        (folder / "keys").write_text(f"benchmark {KEY}\n", encoding="utf-8")
        with StateService(folder, folder / "keys", str(bundles["first"].path)) as service:
            results |= measured(service, bundles, arguments.requests, arguments.rollouts, arguments.closed_loop)
        results["problems"] = problems(results, arguments.requests)
        counts = ", ".join(f"{results[kind]} {kind}" for kind in ("requests", "lost", "wrong"))
        print(f"{counts}; by kind: {results['by_kind']}; by bundle: {results['by_bundle']}")
        print("\n".join(results["examples"]))
    if results["lost"] or results["wrong"] or (results["problems"] and not arguments.check):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
