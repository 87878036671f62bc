"""Whether a precision is faster than float32 on this CPU is measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.export.variants import variants_from_bundle
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.runtimes.runners.speed import measured_speed, speed_in_words


@pytest.mark.parametrize(("precision", "onnxruntime"), [("fp16", True), ("int8", True), ("fp8", False)])
def test_every_runtime_that_serves_the_precision_is_timed(
    precision: str, onnxruntime: bool, precise_bundle: Bundle
) -> None:
    variant = open_variant(precise_bundle, precision, for_cpu=True)  # type: ignore[arg-type]
    speed = measured_speed(precise_bundle, variant)
    openvino = not why_no_openvino(variant.precision)
    expected = ["openvino"] * openvino + ["onnxruntime"] * onnxruntime
    assert [runner.removesuffix("+kernels") for runner in speed["times_as_fast"]] == expected
    for ratios in speed["times_as_fast"].values():
        assert [*ratios] == ["1", "8"]  # the largest batch of this bundle
        assert min(ratios.values()) > 0


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ({"1": 1.852, "16": 1.5}, "1.85 / 1.50 times as fast as float32 on this CPU (batch 1 / 16)"),
        (
            {"1": 1.1, "16": 0.9},
            "1.10 / 0.90 times as fast as float32 on this CPU (batch 1 / 16): slower at batch 16",
        ),
        (
            {"1": 0.75, "16": 0.5},
            "0.75 / 0.50 times as fast as float32 on this CPU (batch 1 / 16): slower, so do not use it here",
        ),
    ],
)
def test_a_slower_precision_is_named_so(ratios: dict[str, float], words: str) -> None:
    assert speed_in_words(ratios) == words


@pytest.mark.export
def test_the_record_keeps_the_measurement(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, tmp_path / "bundle")
    (variant,) = variants_from_bundle(open_bundle(tmp_path / "bundle"), ["fp16"])
    assert variant.record is not None
    speed = json.loads((tmp_path / "bundle" / "model.fp16.json").read_text())["speed"]
    assert speed == variant.record.speed
    assert set(speed) == {"cpu", "cores", "times_as_fast"}
    assert "onnxruntime" in speed["times_as_fast"]
