"""A graph that breaks the contract of a bundle is refused by name; a graph of an export is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import BundleError
from tests.hostile.bundles import GOLDEN
from tests.hostile.graphs import GRAPHS
from tests.parity.faults import with_file

pytestmark = pytest.mark.integration


BROKEN = {
    "graph: Loop of 2**63 rounds": "expected no loop, got the operator Loop",
    "graph: Loop while true": "expected no loop, got the operator Loop",
    "graph: weights from /etc/passwd": "expected all weights in the graph, got the tensor",
    "graph: weights outside the folder": "in another file",
    "graph: a constant in another file": "in another file",
    "graph: weights outside the folder, under a name given twice": "in another file",
    "graph: graphs in graphs": "expected at most 8 levels of graphs inside operators",
    "graph: no outputs": "expected the outputs logits, got none",
    "graph: a second output": "expected the outputs logits, got logits, secret",
    "graph: an output that is a sequence": "expected a tensor, got Sequence(Tensor(FLOAT)) as the type of logits",
    "graph: input of a shape below 0": "sizes from 1, got [batch,-8,8,3] as the shape of pixels",
    "graph: input without dimensions": "expected a batch and sizes from 1, got [] as the shape of pixels",
    "graph: no inputs": "expected the input pixels, got none",
    "graph: a second input": "expected the input pixels, got pixels, more",
    "graph: two nodes with the same output": "the file is not an ONNX graph",
    "graph: text": "the file is not an ONNX graph",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_graphs(name: str, bundle: Bundle, tmp_path: Path) -> None:
    model = onnx.load(bundle.onnx_path)
    changed = GRAPHS[name](model)
    content = changed if isinstance(changed, bytes) else model.SerializeToString()
    with pytest.raises(BundleError, match=r"model\.onnx: ") as caught:
        open_variant(with_file(bundle, tmp_path / "bundle", "model.onnx", content), "fp32")
    assert BROKEN[name] in str(caught.value)


@pytest.mark.parametrize(
    "name", [name for name in GOLDEN if "header" in name or "objects" in name or "no arch" in name]
)
def test_broken_golden_files(name: str, bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, tmp_path / "copy")
    GOLDEN[name](tmp_path / "copy")
    content = (tmp_path / "copy" / "golden.npz").read_bytes()
    with pytest.raises(BundleError, match="expected the reference inputs of a bundle"):
        with_file(bundle, tmp_path / "bundle", "golden.npz", content)


def test_a_compressed_golden_file(bundle: Bundle, tmp_path: Path) -> None:
    import numpy as np

    with np.load(bundle.path / "golden.npz") as file:
        np.savez_compressed(tmp_path / "golden.npz", **file)
    with pytest.raises(BundleError, match="expected arrays without compression"):
        with_file(bundle, tmp_path / "bundle", "golden.npz", (tmp_path / "golden.npz").read_bytes())


def test_a_manifest_nested_too_deep(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(bundle.path, path)
    (path / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(BundleError, match=r"manifest\.json: expected a manifest of a bundle"):
        open_bundle(path)
