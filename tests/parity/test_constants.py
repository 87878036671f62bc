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
from gmmvit_deploy.parity.reference import Reference

pytestmark = pytest.mark.integration


def last_bit(values: np.ndarray) -> np.ndarray:
    return np.nextafter(values, np.float32(np.inf))


@pytest.mark.parametrize(
    ("name", "kind", "change", "recorded", "reason"),
    [
        ("vit_gmm", "masks", last_bit, True, ""),
        (
            *("vit_gmm", "masks", lambda values: values * np.float32(1 + 1e-5), True),
            "model.onnx: blocks.0.attention: the mask in the graph differs from the mask folded here",
        ),
        ("swin_gmm", "biases", last_bit, True, "limit 0.00e+00"),
        ("vit_gmm", "masks", last_bit, False, "differs from the mask in the manifest: expected SHA-256"),
    ],
    ids=["rounded by another processor", "another mask", "a bias that folding only moves", "not the manifest's"],
)
def test_a_constant_that_is_not_the_folded_one_is_named(
    name: str,
    kind: str,
    change: Callable[[np.ndarray], np.ndarray],
    recorded: bool,
    reason: str,
    tensor_bundles: dict[str, Bundle],
    tmp_path: Path,
) -> None:
    """kind: of the first constant, which is changed.  recorded: whether the manifest has its hash."""
    bundle = tensor_bundles[name]
    first: ConstantRecord = getattr(bundle.manifest, kind)[0]
    proto = onnx.load(bundle.onnx_path)
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == first.constant)
    values = change(numpy_helper.to_array(tensor)).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, tmp_path / bundle.onnx_path.name)
    sha256 = sha256_of_bytes(bytes_of_array(values))
    records = tuple(
        replace(record, constant_sha256=sha256) if recorded and record.constant == first.constant else record
        for record in getattr(bundle.manifest, kind)
    )
    changed = Bundle(path=tmp_path, manifest=replace(bundle.manifest, **{kind: records}))
    check = check_constants(changed, Reference(bundle))
    assert (check.verdict == "passed") == (not reason)
    assert reason in "".join(check.reasons[:1])
