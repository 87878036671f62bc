"""An export proves the very file: a fault that is planted in model.onnx ends it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import ExportError, MissingDependencyError, RunnerUnavailableError
from gmmvit_deploy.exporting import bundle_from_checkpoint as module
from gmmvit_deploy.exporting import variants
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.graphs_of_precisions import PreparedGraph
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.graphs.wiring import add_constant, stored
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.chosen import choose_runner
from gmmvit_deploy.runtimes.runners.open import default_runners, fastest_runner, open_runner
from tests.conftest import golden
from tests.parity.faults import with_graph
from tests.runtimes.kernels.test_masked_attention import needs_kernel

pytestmark = pytest.mark.integration

PROVEN = ("onnxruntime", "openvino", "openvino+kernels")

Damage = Callable[[ir.Graph], None]


def wrong_mask_entry(graph: ir.Graph) -> None:
    """Set an entry of the first attention's mask to zero."""
    node = graph.node("blocks.0.attention.scores.before.mask/Mul")
    (mask,) = (value for value in node.inputs if value.is_initializer())
    numbers = stored(mask).copy()
    numbers[(0,) * numbers.ndim] = 0
    mask.const_value = ir.tensor(numbers, name=mask.name)


def batch_of_one(graph: ir.Graph) -> None:
    """Make the first attention's reshape valid for a batch of 1 only."""
    node = graph.node("blocks.0.attention/Reshape.3")
    shape = stored(node.inputs[1])
    node.replace_input_with(1, add_constant(graph, "shape.of.one", np.array([1, *shape[1:]], np.int64)))


def export(out: Path) -> Bundle:
    return bundle_from_checkpoint(golden("vit_gmm").path, out, ExportOptions(input_kind="tensor", max_batch=8))


def exporting(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph that the exporter gives is damaged."""
    exported = module.onnx_from_model

    def broken(*given: Any, **options: Any) -> ir.Model:
        model = exported(*given, **options)
        damage(model.graph)
        return model

    monkeypatch.setattr(module, "onnx_from_model", broken)


@pytest.mark.nightly
def test_a_wrong_mask_entry_shows_in_the_logits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged after the masks were compared bit for bit: what is left is the run of the file."""
    prove = module.prove_folded

    def damaged_later(graph: ir.Graph, *folded: Any, **options: Any) -> Any:
        records = prove(graph, *folded, **options)
        wrong_mask_entry(graph)
        return records

    monkeypatch.setattr(module, "prove_folded", damaged_later)
    with pytest.raises(ExportError, match="runner onnxruntime: the logits differ from PyTorch's by"):
        export(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@needs_kernel
def test_a_fault_that_our_kernels_would_hide_ends_the_export(
    tensor_bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged operators are those that our kernel replaces, so the graph with it may give right answers."""
    right = tensor_bundles["vit_gmm"]
    model = ir.load(right.onnx_path)
    batch_of_one(model.graph)
    damaged = with_graph(right, tmp_path / "damaged", ir.to_proto(model))
    inputs, logits = right.golden()
    with open_runner("openvino+kernels", damaged) as ours:
        np.testing.assert_allclose(ours.run(inputs), logits, atol=1e-5)
    exporting(batch_of_one, monkeypatch)
    with pytest.raises(ExportError, match=r"vit_gmm\.pth: no runtime .*: runner onnxruntime: it cannot run the graph"):
        export(tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize("name", ["vit_gmm", "eanet_performer"])
def test_both_differences_are_in_the_manifest(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    manifest = tensor_bundles[name].manifest
    parity, recorded = manifest.export_parity, manifest.export_skipped
    names, skipped = default_runners(tensor_bundles[name])
    proven = [runner for runner in PROVEN if runner not in recorded]
    assert set(names) <= set(proven)
    assert {"onnxruntime", "openvino"} <= set(proven)
    assert parity.keys() == {*(f"{runner}_largest_abs" for runner in proven), "limit", "spread"}
    assert parity["spread"] > parity["limit"]
    assert all(0 < parity[f"{runner}_largest_abs"] <= parity["limit"] for runner in proven)
    assert all(f"runner {runner} cannot run here: " in why for runner, why in recorded.items())
    if name == "eanet_performer":  # its attentions have no Q Kᵀ
        assert names == ["onnxruntime", "openvino"]
        assert skipped[0].startswith("openvino+kernels: ")
        assert recorded.keys() == {"openvino+kernels"}


@pytest.mark.parametrize(
    ("precision", "runs", "reason"),
    [
        ("fp16", {"onnxruntime"}, "not in fp16"),
        ("int8", {"onnxruntime", "openvino"}, ""),
        ("bf16", set(), "ONNX Runtime"),
        ("fp8", set(), "not in fp8"),
    ],
)
def test_the_file_of_a_precision_is_proven_where_a_runtime_takes_it(
    precision: str, runs: set[str], reason: str, precise_bundle: Bundle
) -> None:
    record = open_variant(precise_bundle, precision, "static" if precision == "int8" else "").record
    assert record is not None
    proven = {name for name, proof in record.programs.items() if "largest_abs" in proof}
    assert runs <= proven
    for name in proven:
        assert 0 < record.programs[name]["largest_abs"] <= record.programs[name]["limit"]
    skipped = {name: proof["skipped"] for name, proof in record.programs.items() if name not in proven}
    if reason:
        assert any(reason in why for why in skipped.values()), skipped
    assert not any("/tmp" in why for why in skipped.values())


def test_a_fault_in_the_file_of_a_precision_ends_the_conversion(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = with_graph(bundle, tmp_path / "bundle", onnx.load(bundle.onnx_path))
    before = {path.name for path in copied.path.iterdir()}
    prepared = variants.prepared_graph

    def broken(*given: Any, **options: Any) -> PreparedGraph:
        made = prepared(*given, **options)
        batch_of_one(made.model.graph)
        return made

    # The emulation would detect the fault as well; it is patched, so that only the proof of the file can.
    monkeypatch.setattr(variants, "emulated_outputs", lambda *given, **options: (bundle.golden_rows()[1]["logits"],))
    monkeypatch.setattr(variants, "prepared_graph", broken)
    with pytest.raises(ExportError, match=r"fp16\.onnx: .*: runner onnxruntime:fp16: it cannot run the"):
        variant_from_bundle(copied, "fp16")
    assert {path.name for path in copied.path.iterdir()} == before


@pytest.mark.nightly
def test_an_export_that_no_runtime_can_prove_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: Any, **options: Any) -> Any:
        raise MissingDependencyError("onnxruntime", extra="cpu")

    monkeypatch.setattr(module, "proof_programs", lambda *given: dict.fromkeys(PROVEN, missing))
    with pytest.raises(ExportError, match="no runtime on this machine gives PyTorch's outputs: onnxruntime is not"):
        export(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("raises", [True, False], ids=["cannot run", "wrong logits"])
def test_a_fault_of_openvino_leaves_openvino_out(raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle is written, nothing takes OpenVINO by itself, and OpenVINO gives no answer to whom names it."""
    run = OpenVinoRunner._run

    def faulty(self: OpenVinoRunner, batch: Any) -> Any:
        if raises and len(batch) > 1:
            raise RuntimeError("Check 'false' failed at src/plugin.cpp")
        return run(self, batch) + 1

    monkeypatch.setattr(OpenVinoRunner, "_run", faulty)
    export(tmp_path / "bundle")
    made = open_bundle(tmp_path / "bundle")
    left_out = {"openvino"} | {name for name in made.manifest.export_skipped if name == "openvino+kernels"}
    assert set(made.manifest.wrong_runners) >= {"openvino"}
    assert "onnxruntime_largest_abs" in made.manifest.export_parity
    assert not any(name.startswith("openvino") for name in made.manifest.export_parity)
    reason = "it cannot run the graph in a batch of 8: Check 'false'" if raises else "the logits differ from PyTorch's"
    assert reason in made.manifest.export_skipped["openvino"]
    names, why = default_runners(made)
    assert (names, fastest_runner(made)[0], str(choose_runner(made).runner)) == (["onnxruntime"], *["onnxruntime"] * 2)
    assert reason in " ".join(why)
    for name in left_out & set(made.manifest.wrong_runners):
        with open_runner(name, made) as runner, pytest.raises((RunnerUnavailableError, RuntimeError)):
            runner.run(made.golden()[0])
    if not raises:
        variant_from_bundle(made, "bf16")  # a fault of OpenVINO, which runs model.onnx, is not one of graphs/bf16.onnx
        programs = open_variant(made, "bf16").record.programs  # type: ignore[union-attr]
        assert all("largest_abs" not in proof for proof in programs.values())


@needs_kernel
@pytest.mark.first(1)
@pytest.mark.skipif(bool(int8_saturates()), reason="int8 products saturate on this CPU")
@pytest.mark.parametrize("wrong", ["openvino", "openvino+kernels"])
def test_a_fault_of_one_form_of_int8_leaves_the_other(
    wrong: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, right = OpenVinoRunner._run, next(name for name in PROVEN[1:] if name != wrong)
    assert fastest_runner(bundle) == ("openvino+kernels", "")

    def faulty(self: OpenVinoRunner, batch: Any) -> Any:
        return run(self, batch) + (self.precision == "int8" and self.name == wrong)

    monkeypatch.setattr(OpenVinoRunner, "_run", faulty)
    made = open_bundle(shutil.copytree(bundle.path, tmp_path / "bundle"))
    variant_from_bundle(made, "int8")
    programs = open_variant(made, "int8", "dynamic").record.programs  # type: ignore[union-attr]
    assert "the logits differ from PyTorch's" in programs[wrong]["skipped"]
    assert "largest_abs" in programs[right]
    assert fastest_runner(made, "int8")[0] == right
    assert right in default_runners(made, "int8")[0]
