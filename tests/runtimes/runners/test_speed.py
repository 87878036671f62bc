"""Whether a precision is faster than float32 on this CPU is measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.exporting.variants import variants_from_bundle
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.runtimes.runners.speed import measured_speed, speed_in_words


@pytest.mark.first(1)
@pytest.mark.parametrize(("precision", "onnxruntime"), [("int8", True), ("fp8", False)])
def test_every_runtime_that_serves_the_precision_is_timed(
    precision: str, onnxruntime: bool, precise_bundle: Bundle
) -> None:
    variant = open_variant(precise_bundle, precision, "static" if precision == "int8" else "")  # type: ignore[arg-type]
    speed = measured_speed(precise_bundle, variant)
    openvino = not why_no_openvino(variant.precision)
    expected = ["openvino"] * openvino + ["onnxruntime"] * onnxruntime
    assert [runner.removesuffix("+kernels") for runner in speed["times_as_fast"]] == expected
    for ratios in speed["times_as_fast"].values():
        assert [*ratios] == ["1", "8"]  # the largest batch of this bundle
        assert all(0 < low <= ratio <= high for ratio, low, high in ratios.values())


@pytest.mark.parametrize(
    ("ends", "advice"),
    [
        ((1.85, 1.7, 1.9), ""),
        ((0.75, 0.7, 0.9), ": slower, so do not use it here"),
        ((0.95, 0.8, 1.1), ": no clear difference"),
    ],
)
def test_a_slower_precision_is_named_so(ends: tuple[float, float, float], advice: str) -> None:
    ratio, low, high = ends
    words = f"batch 16: {ratio:.2f} ({low:.2f} to {high:.2f}) times as fast as float32{advice}"
    assert speed_in_words({"16": ends}) == words


@pytest.mark.integration
def test_the_record_keeps_the_measurement(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    (variant,) = variants_from_bundle(open_bundle(tmp_path / "bundle"), ["fp16"])
    assert variant.record is not None
    speed = json.loads((tmp_path / "bundle" / "graphs/fp16.json").read_text())["speed"]
    assert speed == variant.record.speed
    assert set(speed) == {"cpu", "cores", "times_as_fast"}
    assert "onnxruntime" in speed["times_as_fast"]
