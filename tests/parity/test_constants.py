"""Parity's check of constants bears the rounding of another processor, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.graphs.constants import ConstantRecord, bytes_of_array
from gmmvit_deploy.parity._constants import check_constants
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.reference import Reference

pytestmark = pytest.mark.integration


def judged(
    bundle: Bundle, kind: str, change: Callable[[np.ndarray], np.ndarray], folder: Path, *, recorded: bool = True
) -> Check:
    """Check a copy of the bundle in which the first mask or bias is another.

    kind: ``masks`` or ``biases``.  recorded: whether the manifest has the hash of the changed constant.
    """
    first: ConstantRecord = getattr(bundle.manifest, kind)[0]
    proto = onnx.load(bundle.onnx_path)
    changed = b""
    for tensor in proto.graph.initializer:
        if tensor.name == first.constant:
            values = change(numpy_helper.to_array(tensor)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
            changed = bytes_of_array(values)
    onnx.save(proto, folder / bundle.onnx_path.name)
    records = [
        replace(record, constant_sha256=sha256_of_bytes(changed)) if record.constant == first.constant else record
        for record in getattr(bundle.manifest, kind)
    ]
    manifest = replace(bundle.manifest, **{kind: tuple(records)}) if recorded else bundle.manifest
    return check_constants(Bundle(path=folder, manifest=manifest), Reference(bundle))


def last_bit(values: np.ndarray) -> np.ndarray:
    return np.nextafter(values, np.float32(np.inf))


def test_a_mask_that_another_processor_rounded(tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    assert judged(tensor_bundles["vit_gmm"], "masks", last_bit, tmp_path).verdict == "passed"


def test_another_mask_is_named(tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    check = judged(tensor_bundles["vit_gmm"], "masks", lambda values: values * np.float32(1 + 1e-5), tmp_path)
    (reason,) = check.reasons
    assert reason.startswith("model.onnx: blocks.0.attention: the mask in the graph differs from the mask folded here")


def test_a_bias_that_folding_only_moves_has_the_same_bits(tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    (reason,) = judged(tensor_bundles["swin_plain"], "biases", last_bit, tmp_path).reasons
    assert reason.endswith("limit 0.00e+00")


def test_the_bytes_are_those_of_the_manifest(tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    check = judged(tensor_bundles["vit_gmm"], "masks", last_bit, tmp_path, recorded=False)
    assert "differs from the mask in the manifest: expected SHA-256" in check.reasons[0]
