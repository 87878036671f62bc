"""Compare runners with the logits that PyTorch computed at export, if this process cannot build the model.

The code of a model can be in a file that gmmvit runs only if the command names the file. Without the file, the golden
inputs of the bundle and their logits are the reference: numeric, decisions, batch invariance, preprocessing and served
run on the golden inputs. The other checks need PyTorch's logits of further inputs, and are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.variants import recorded_errors
from gmmvit_deploy.parity.crossings import decisions_of
from gmmvit_deploy.parity.inputs import Batch, golden_batch
from gmmvit_deploy.parity.invariance import check_invariance
from gmmvit_deploy.parity.numeric import Distances, check_numeric, comparable
from gmmvit_deploy.parity.preprocessing import check_preprocessing
from gmmvit_deploy.parity.report import ParityReport, RunnerReport
from gmmvit_deploy.parity.served import check_served
from gmmvit_deploy.parity.verdict import Check, skipped_check
from gmmvit_deploy.progress import OnProgress, Progress, ignore, prefixed
from gmmvit_deploy.reports.reporting import described_bundle
from gmmvit_deploy.runtimes.runners.runner import Runner
from gmmvit_deploy.tolerances import Limit, Noise

__all__ = ["check_against_stored", "stored_noise"]

_OF_BUNDLE = ("constants", "reference")


def stored_noise(bundle: Bundle, stored: NDArray[Any]) -> Noise:
    """Return the float32 noise that export recorded.  stored: (B, C), the golden logits of the bundle."""
    largest = bundle.manifest.float32_noise
    return Noise(largest=largest, rms=largest, scale=float(np.abs(stored).max()))


def check_against_stored(
    bundle: Bundle,
    runners: Sequence[Runner],
    why: str,
    *,
    skipped: Sequence[str] = (),
    on_progress: OnProgress = ignore,
) -> ParityReport:
    """Run the checks that need no model on every runner.

    why: the reason why this process cannot build the model, for the skipped checks.
    skipped: runners that were left out, each with the reason, for the report.
    Errors: every error that a runner raises.
    """
    golden, stored = golden_batch(bundle)
    checked: dict[Path, list[str]] = {}
    return ParityReport(
        bundle=described_bundle(bundle),
        versions=tool_versions(),
        data=None,
        checks=tuple(skipped_check(name, f"needs the model in PyTorch: {why}") for name in _OF_BUNDLE),
        runners=tuple(_report(bundle, runner, golden, stored, why, checked, on_progress) for runner in runners),
        skipped=tuple(skipped),
    )


def _report(
    bundle: Bundle,
    runner: Runner,
    golden: Batch,
    stored: NDArray[Any],
    why: str,
    checked: dict[Path, list[str]],
    on_progress: OnProgress,
) -> RunnerReport:
    on_progress(Progress(f"{runner.name}: golden inputs"))
    logits = runner.rows(golden.inputs)
    distances = Distances("golden", stored=stored_noise(bundle, stored))
    distances.add(logits, stored, stored)
    recorded = recorded_errors(bundle, runner.precision, for_cpu=runner.device == "cpu")
    numbers = distances.numbers(runner.precision, recorded["largest_abs"] if recorded else None)
    decisions = decisions_of(bundle.manifest.label_set)
    if bundle.manifest.has_logits and comparable(logits, stored):
        whole = np.isfinite(logits).all(1)
        where = [place for place, fine in zip(golden.where, whole, strict=True) if fine]
        decisions.add(where, logits[whole], stored[whole], stored[whole])
    progress = prefixed(runner.name, on_progress)
    needs_model = f"needs PyTorch's logits of further images: {why}"
    checks = [
        check_numeric([numbers]),
        decisions.check(numbers.limit)
        if bundle.manifest.has_logits
        else skipped_check("decisions", "the bundle has no logits"),
        skipped_check("accuracy", needs_model),
        check_invariance(runner, golden.inputs, stored, numbers.limit, on_progress=progress),
        skipped_check("calibration", _no_calibration(runner, why if recorded else "")),
        check_preprocessing(bundle, runner, numbers.limit, checked=checked),
        _served(bundle, runner, golden, stored, numbers.limit, progress),
        skipped_check("localize", f"needs the model in PyTorch: {why}"),
    ]
    return RunnerReport(
        runner=runner.name,
        precision=runner.precision,
        provenance=runner.provenance(),
        checks=tuple(checks),
        points=decisions.points(),
    )


def _no_calibration(runner: Runner, why: str) -> str:
    return f"needs the model in PyTorch: {why}" if why else f"{runner.precision} needs no calibration"


def _served(
    bundle: Bundle, runner: Runner, golden: Batch, stored: NDArray[Any], limit: Limit, on_progress: OnProgress
) -> Check:
    if runner.server is None:
        return skipped_check("served", f"{runner.name} runs in this process, without a server")
    return check_served(
        bundle,
        runner,
        runner.server,
        golden.inputs,
        stored,
        limit,
        reference="the logits that PyTorch computed at export",
        on_progress=on_progress,
    )
