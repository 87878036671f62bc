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


@pytest.mark.first(1)
@pytest.mark.parametrize("damaged", [wrong_entry, heads_swapped])
def test_a_fault_in_a_mask(
    damaged: Callable[[np.ndarray], np.ndarray], tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged() -> ParityReport:
        with open_runners(["openvino", "openvino+kernels"], tensor_bundles["vit_gmm"]) as runners:
            return check_parity(tensor_bundles["vit_gmm"], runners, ParityOptions(localize=True))

    before = judged()
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
        return replace(prepared, numbers=np.ascontiguousarray(damaged(prepared.numbers)))

    monkeypatch.setattr(openvino_kernels, "prepared_mask", broken)
    report = judged()
    plain, ours = report.runners
    assert [check.verdict for check in report.checks] == ["passed", "passed"]
    assert plain.verdict == "passed", report.failures()
    assert ours.check("numeric").verdict == "failed"
    assert ours.check("localize").details["first"] == "blocks.1"
    assert "with our kernels" in ours.check("localize").details["graph"]
    assert f"{ours.runner.name}: localize: blocks.1: its output differs" in "".join(report.failures())
    assert ours.provenance["graph SHA-256"] != before.runners[1].provenance["graph SHA-256"]
