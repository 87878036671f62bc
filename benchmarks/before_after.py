"""Is each family's program as fast after a change of the project as before?

    before     the checkout before the change
    control    a second process of the checkout before the change, for an A/A comparison
    after      the checkout after the change, by default the checkout of this script

*before* writes a checkpoint of each model of the paper (32×32, 10 classes, GMM with K = 5 a head, random weights). Both
checkouts export it and run the graph in OpenVINO with our kernels, and in ONNX Runtime, in float32, or on request int8
(calibrated with the same random images), or bf16 in OpenVINO.

A process computes only in its turn, and every process has a turn in each round. Programs are loaded several times,
because the place of the weights in memory changes the speed by up to 2 %. A program is as fast as before if after /
before differs from 1 by at most 2 %, or by at most as much as control / before; else the exit status is 1. The script
stops if the logits of two processes differ by more than `MAX_OFF` of the largest logit.

    python benchmarks/before_after.py --before CHECKOUT [--family vit] [--check] [--output RESULT]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.shared import run_card
from benchmarks.shared.checkouts import Checkout, commit_of, opened_checkout
from benchmarks.shared.interleaved import turns
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.places import FAMILIES, ROOT
from benchmarks.shared.results import interval
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.measure.turns import UNTIMED_S

BATCHES = (1, 64)
RUNTIMES = ("onnxruntime", "openvino")
BEFORE, CONTROL, AFTER = "before", "control", "after"
_WARM_UP_ROUNDS = 2
_IMAGES_A_TURN = 32
_CALIBRATION_IMAGES = 32
MAX_OFF = {"fp32": 1e-4, "bf16": 2e-2, "int8": 1e-1}
"""Precision → the largest allowed difference, divided by the largest logit.  A rounding may fall to the other side."""
_MIN_ALLOWED = 0.02
"""The least difference from 1 of a ratio that does not count as a difference of speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The time after / before a change, and of a second process of *before* / before (``control``)."""

    ratio: Measured
    control: Measured

    @property
    def allowed(self) -> float:
        """The largest |ratio − 1| that counts as equally fast."""
        return max(_MIN_ALLOWED, abs(self.control.value - 1))

    @property
    def verdict(self) -> Literal["as fast", "slower", "faster"]:
        """The verdict. It depends only on the ratios, not on their intervals."""
        deviation = self.ratio.value - 1
        if abs(deviation) <= self.allowed:
            return "as fast"
        return "slower" if deviation > 0 else "faster"


def require_close(logits: Mapping[str, np.ndarray], reference: np.ndarray, where: str, precision: str) -> None:
    """Compare the logits (name → logits) with the reference.  Errors: SystemExit beyond `MAX_OFF`."""
    most = MAX_OFF[precision]
    for name, answers in logits.items():
        if answers.shape != reference.shape:
            raise SystemExit(f"{where}: expected logits {reference.shape} of {name}, got {answers.shape}")
        off = float(np.abs(answers - reference).max() / np.abs(reference).max())
        if not off <= most:
            raise SystemExit(f"{where}: logits of {name} differ by {off:.1e}, expected at most {most:g}")


def exported(
    family: str, checkouts: Mapping[str, Checkout], folder: Path, precisions: Iterable[str] = ("fp32",)
) -> dict[str, Path]:
    """Export the checkpoint with each checkout, also in int8 if requested; return name of the process → bundle."""
    checkpoint = folder / f"{family}.pth"
    checkouts[BEFORE].ask("checkpoint", family=family, path=str(checkpoint))
    bundles = {name: folder / f"{family}-{name}" for name in (BEFORE, AFTER)}
    if checkouts[AFTER].root == checkouts[BEFORE].root:
        bundles[AFTER] = bundles[BEFORE]
    for bundle in dict.fromkeys(bundles.values()):
        name = BEFORE if bundle == bundles[BEFORE] else AFTER
        checkouts[name].ask("export", checkpoint=str(checkpoint), bundle=str(bundle), max_batch=max(BATCHES))
        if "int8" in precisions:
            images = folder / "calibration.npy"
            shape = (_CALIBRATION_IMAGES, 3, 32, 32)
            np.save(images, np.random.default_rng(1).standard_normal(shape, dtype=np.float32))
            checkouts[name].ask("convert", bundle=str(bundle), precision="int8", images=str(images))
    return {**bundles, CONTROL: bundles[BEFORE]}


def timed(
    checkouts: Mapping[str, Checkout],
    bundles: Mapping[str, Path],
    runtime: str,
    precision: str,
    *,
    batches: tuple[int, ...],
    rounds: int,
    loads: int,
) -> dict[int, dict[str, list[float]]]:
    """Return batch → name of the process → ms of each round of every load."""
    generator = np.random.default_rng(0)
    times: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in checkouts} for batch in batches}
    for load in range(loads):
        for name in generator.permutation(list(checkouts)):
            checkouts[str(name)].ask("load", bundle=str(bundles[str(name)]), runtime=runtime, precision=precision)
        for batch in batches:
            logits: dict[str, np.ndarray] = {}
            for name, counts in turns(list(checkouts), rounds, generator, warm_ups=_WARM_UP_ROUNDS):
                answer = checkouts[name].ask(
                    "run", batch=batch, seed=load, repeats=max(1, _IMAGES_A_TURN // batch), untimed_s=UNTIMED_S
                )
                logits[name] = np.asarray(answer["logits"])
                if counts:
                    times[batch][name].append(answer["ms"])
            require_close(logits, logits[BEFORE], f"{runtime}:{precision}, batch {batch}", precision)
    return times


def changes(times: Mapping[int, Mapping[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Return batch → the row of the result for this batch."""
    rows = {}
    for batch, by_name in times.items():
        change = Change(ratio=ratio(by_name[AFTER], by_name[BEFORE]), control=ratio(by_name[CONTROL], by_name[BEFORE]))
        rows[str(batch)] = {
            "before_ms": float(np.median(by_name[BEFORE])),
            "after_over_before": change.ratio,
            "control_over_before": change.control,
            "allowed": change.allowed,
            "verdict": change.verdict,
        }
    return rows


def main() -> int:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the project before the change")
    parser.add_argument(
        "--after", type=Path, default=ROOT, help="checkout after the change; default: the checkout of this script"
    )
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be repeated")
    parser.add_argument("--runtime", choices=RUNTIMES, action="append", help="only this runtime; may be repeated")
    parser.add_argument("--precision", choices=MAX_OFF, action="append", help="instead of fp32; bf16 only in OpenVINO")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this batch; may be repeated")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each load")
    parser.add_argument("--loads", type=int, default=3, help="how often each program is loaded")
    arguments = parsed(parser, family=["vit"], runtime=["onnxruntime"], batch=[1], rounds=1, loads=1)
    if arguments.rounds < 1 or arguments.loads < 1:
        parser.error("expected --rounds and --loads of at least 1")
    precisions = arguments.precision or ["fp32"]
    programs = [
        (runtime, precision)
        for runtime in arguments.runtime or RUNTIMES
        for precision in precisions
        if runtime == "openvino" or precision != "bf16"
    ]
    if not programs:
        parser.error("only OpenVINO computes in bf16: expected --runtime openvino")
    slower = []
    with ExitStack() as stack:
        paths = {BEFORE: arguments.before, CONTROL: arguments.before, AFTER: arguments.after}
        checkouts = {name: stack.enter_context(opened_checkout(path, name)) for name, path in paths.items()}
        settings = {"before": commit_of(arguments.before), "after": commit_of(arguments.after)}
        results = stack.enter_context(
            run_card.written(
                arguments.output, Path(__file__).name, **settings, rounds=arguments.rounds, loads=arguments.loads
            )
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results["families"] = {}
        for family in arguments.family or FAMILIES:
            bundles = exported(family, checkouts, folder, precisions)
            results["families"][family] = {}
            for runtime, precision in programs:
                runner = f"{runtime}:{precision}"
                times = timed(
                    checkouts,
                    bundles,
                    runtime,
                    precision,
                    batches=tuple(arguments.batch or BATCHES),
                    rounds=arguments.rounds,
                    loads=arguments.loads,
                )
                rows = results["families"][family][runner] = changes(times)
                for batch, row in rows.items():
                    name = f"{family}, {runner}, batch {batch}"
                    print(
                        f"{name}: {row['verdict']}: before {row['before_ms']:.2f} ms, after / before "
                        f"{interval(row['after_over_before'], 3)}, control / before "
                        f"{interval(row['control_over_before'], 3)}, allowed difference {row['allowed']:.1%}",
                        flush=True,
                    )
                    slower += [name] if row["verdict"] == "slower" else []
    for name in slower:
        print(f"slower: {name}", file=sys.stderr)
    return 1 if slower and not arguments.check else 0  # a single round is noise


if __name__ == "__main__":
    sys.exit(main())
