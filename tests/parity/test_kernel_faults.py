"""Parity locates a fault in the inputs of our kernels in its block; the original graph file passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference import openvino_kernels
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.runtimes.runners.open import open_runners
from tests.runtimes.kernels.test_masked_attention import needs_kernel

pytestmark = needs_kernel


def wrong_entry(numbers: np.ndarray) -> np.ndarray:
    damaged = numbers.copy()
    damaged[0, np.abs(damaged[0]).argmax()] = 0
    return damaged


def heads_swapped(numbers: np.ndarray) -> np.ndarray:
    return numbers[[1, 0, *range(2, len(numbers))]]


FAULTS = {"a wrong mask entry": wrong_entry, "two heads swapped": heads_swapped}


def judged(names: list[str], bundle: Bundle) -> ParityReport:
    with open_runners(names, bundle) as runners:
        return check_parity(bundle, runners, ParityOptions(localize=True))


def assert_fault_in_block(report: ParityReport, block: str = "blocks.1") -> None:
    plain, ours = report.runners
    assert [check.verdict for check in report.checks] == ["passed", "passed"]
    assert plain.verdict == "passed", report.failures()
    assert ours.check("numeric").verdict == "failed"
    localized = ours.check("localize")
    assert localized.details["first"] == block, localized
    assert "with our kernels" in localized.details["graph"]
    assert f"{ours.runner}: localize: {block}: its output differs" in "".join(report.failures())


@pytest.mark.first(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_mask(fault: str, tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    right = ["openvino", "openvino+kernels"]
    before = judged(right, tensor_bundles["vit_gmm"])
    assert before.passed, before.failures()
    prepare: Callable[..., Any] = openvino_kernels.prepared_mask
    seen: list[bytes] = []

    def broken(mask: np.ndarray, arithmetic: Any) -> Any:
        """Damage the second mask only, however often it is prepared."""
        prepared = prepare(mask, arithmetic)
        if mask.tobytes() not in seen:
            seen.append(mask.tobytes())
        if seen.index(mask.tobytes()) != 1:
            return prepared
        return replace(prepared, numbers=np.ascontiguousarray(FAULTS[fault](prepared.numbers)))

    monkeypatch.setattr(openvino_kernels, "prepared_mask", broken)
    report = judged(right, tensor_bundles["vit_gmm"])
    assert_fault_in_block(report)
    hashes = [each_report.runners[1].provenance["graph SHA-256"] for each_report in (before, report)]
    assert hashes[0] != hashes[1]
