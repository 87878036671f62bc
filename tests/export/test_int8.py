"""In int8, a bundle has a graph for GPUs and one for CPUs; without images, OpenVINO quantises the activations."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.doctor import examine_bundle
from gmmvit_deploy.errors import BundleError, ExportError, GmmvitError, InputError, OutputError, RunnerUnavailableError
from gmmvit_deploy.exporting import variants as module
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.graphs.declared import declare
from gmmvit_deploy.graphs.quantize import DYNAMIC, DYNAMIC_COLUMNS, quantize_graph
from gmmvit_deploy.inference.cores import has_vnni
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.parity._calibration import check_calibration
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.runtimes.runners.open import default_runners, open_runner, open_runners
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.tolerances import signal_to_noise_db
from tests.graphs import small_graphs

GPU, CPU, RECORD = "graphs/int8.onnx", "graphs/int8-static.onnx", "graphs/int8-static.json"


@pytest.fixture
def copied(precise_bundle: Bundle, tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(precise_bundle.path, tmp_path / "bundle"))


def float_types(graph: onnx.GraphProto) -> set[int]:
    kinds = {constant.data_type for constant in graph.initializer}
    kinds |= {node.attribute[0].i for node in graph.node if node.op_type == "Cast"}
    return kinds & {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def test_the_graph_for_cpus_has_the_form_of_the_float32_graph(precise_bundle: Bundle) -> None:
    gpu, cpu = open_variant(precise_bundle, "int8"), open_variant(precise_bundle, "int8", "static")
    assert [graph.path for graph in (gpu, cpu)] == [precise_bundle.path / file for file in (GPU, CPU)]
    assert cpu.record is not None
    assert cpu.sha256 == cpu.record.onnx_sha256 == sha256_of_file(cpu.path)
    proto = onnx.load(cpu.path)
    onnx.checker.check_model(proto, full_check=True)
    assert float_types(proto.graph) == {TensorProto.FLOAT}
    assert TensorProto.FLOAT16 in float_types(onnx.load(gpu.path).graph)
    added = ("QuantizeLinear", "DequantizeLinear")
    plain = onnx.load(precise_bundle.onnx_path).graph
    assert [n.name for n in proto.graph.node if n.op_type not in added] == [n.name for n in plain.node]
    assert any(node.op_type == "QuantizeLinear" for node in proto.graph.node)
    assert "separate_projections" not in cpu.record.passes
    assert gpu.record is not None
    assert "separate_projections" in gpu.record.passes
    assert all(mask.largest_change == 0 for mask in cpu.record.masks)


@pytest.mark.nightly
def test_each_graph_has_its_own_calibration(copied: Bundle) -> None:
    path = copied.path / RECORD
    data = json.loads(path.read_text())
    data["calibration"]["recipe"]["db"] += 20
    path.write_text(json.dumps(data))
    pixels = np.random.default_rng(5).integers(0, 256, (16, *copied.manifest.image.pixels_shape), dtype=np.uint8)
    inputs = copied.inputs_from_pixels(pixels)
    exact = emulated_logits(ir.load(copied.onnx_path), inputs, name="model.onnx")
    checks = []
    for form in ("", "static"):
        graph = QuantisedGraph(copied, "int8", form)  # type: ignore[arg-type]
        db = signal_to_noise_db(graph.logits(inputs, real=True), exact)
        checks.append(check_calibration(copied, graph, db))
    assert [check.verdict for check in checks] == ["passed", "failed"], checks


@pytest.mark.parametrize(
    ("options", "file"),
    [
        (RepositoryOptions(runner=RunnerName("onnxruntime", "int8")), CPU),
        (RepositoryOptions(runner=RunnerName("openvino", "int8")), CPU),
        (RepositoryOptions(backend="onnxruntime", runner=RunnerName("onnxruntime-cuda", "int8")), GPU),
    ],
)
def test_a_repository_has_the_graph_of_its_device(
    options: RepositoryOptions, file: str, precise_bundle: Bundle, tmp_path: Path
) -> None:
    repository_from_bundle(precise_bundle, tmp_path / "r", options)
    graph = tmp_path / "r" / options.network / "1" / "model.onnx"
    assert graph.read_bytes() == (precise_bundle.path / file).read_bytes()


def test_a_copy_for_cpus_needs_no_graph_for_gpus(copied: Bundle) -> None:
    (copied.path / GPU).unlink()
    open_variant(copied, "int8", "static")
    with pytest.raises(BundleError, match=re.escape(f"expected the graph {GPU} and its record")) as caught:
        open_variant(copied, "int8")
    assert caught.value.hint.endswith("--precision int8 --calibration IMAGES --force")
    checks = {check.name: check.works for check in examine_bundle(copied, None)}
    assert (checks[CPU], checks[GPU]) == (True, False)


@pytest.mark.nightly
def test_no_file_is_replaced_when_the_last_cannot_be_written(
    copied: Bundle, calibration_images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in copied.path.glob("graphs/int8*")}
    written = []

    def fsync(handle: int) -> None:
        written.append(handle)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    images = open_images(copied, str(calibration_images), limit=4)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", fsync)
        with pytest.raises(OutputError, match="No space left on device"):
            variant_from_bundle(copied, "int8", calibration=images, force=True)
    assert len(written) == 3
    assert {path.name: path.read_bytes() for path in copied.path.glob("graphs/int8*")} == before


def test_an_existing_graph_for_cpus_is_kept(copied: Bundle, calibration_images: Path) -> None:
    (copied.path / GPU).unlink()
    before = (copied.path / CPU).read_bytes()
    with pytest.raises(OutputError, match=r"int8-static\.onnx exists"):
        variant_from_bundle(copied, "int8", calibration=open_images(copied, str(calibration_images), limit=4))
    assert (copied.path / CPU).read_bytes() == before
    assert not (copied.path / GPU).exists()


# ---- without calibration images --------------------------------------------------------------------------------------


DYNAMIC_GRAPH = "graphs/int8-dynamic.onnx"
TO_TYPE = "--precision int8 --calibration IMAGES"


@pytest.fixture(scope="module")
def dynamic(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    copied = open_bundle(shutil.copytree(bundle.path, tmp_path_factory.mktemp("dynamic") / "bundle"))
    variant_from_bundle(copied, "int8")
    return copied


@pytest.mark.integration
def test_the_only_graph_is_for_cpus(dynamic: Bundle) -> None:
    assert {path.name for path in dynamic.path.glob("graphs/*")} == {"int8-dynamic.onnx", "int8-dynamic.json"}
    proto = onnx.load(open_variant(dynamic, "int8", "dynamic").path)
    onnx.checker.check_model(proto, full_check=True)
    kinds = [node.op_type for node in proto.graph.node]
    assert "DequantizeLinear" in kinds
    assert "QuantizeLinear" not in kinds
    checks = {check.name: check for check in examine_bundle(dynamic, None)}
    assert "graphs/int8.onnx" not in checks
    assert checks[DYNAMIC_GRAPH].works
    assert "times as fast as float32" in checks["int8-dynamic"].detail


@pytest.mark.integration
@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (lambda bundle, _: open_variant(bundle, "int8"), BundleError),
        (lambda bundle, _: open_runner("onnxruntime", bundle, precision="int8"), RunnerUnavailableError),
        (
            lambda bundle, out: repository_from_bundle(
                bundle, out, RepositoryOptions(runner=RunnerName("onnxruntime", "int8"))
            ),
            InputError,
        ),
        (
            lambda bundle, out: repository_from_bundle(
                bundle, out, RepositoryOptions(backend="onnxruntime", runner=RunnerName("onnxruntime-tensorrt", "int8"))
            ),
            BundleError,
        ),
    ],
    ids=["engine", "onnxruntime", "repository for ONNX Runtime", "repository for a GPU"],
)
def test_what_cannot_run_it_says_what_to_type(asked, error: type[GmmvitError], dynamic: Bundle, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=r"OpenVINO alone quantises activations|without calibration images") as caught:
        asked(dynamic, tmp_path / "out")
    assert caught.value.hint.endswith(TO_TYPE)
    assert not (tmp_path / "out").exists()


@pytest.mark.integration
@pytest.mark.nightly
def test_a_scale_of_the_wrong_channel_is_named(dynamic: Bundle, tmp_path: Path) -> None:
    bundle = open_bundle(shutil.copytree(dynamic.path, tmp_path / "bundle"))
    path, record_path = bundle.path / DYNAMIC_GRAPH, bundle.path / "graphs/int8-dynamic.json"
    proto = onnx.load(path)
    scale = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith(".scale"))
    scale.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(scale), 1), scale.name))
    onnx.save(proto, path)
    record = json.loads(record_path.read_text())
    record["onnx_sha256"] = sha256_of_file(path)
    record_path.write_text(json.dumps(record))
    with open_runners(["openvino"], bundle, precision="int8") as runners:
        (runner,) = check_parity(bundle, runners).runners
    assert any(".scale is" in why for why in runner.check("calibration").reasons)


@pytest.mark.integration
def test_parity_and_a_repository_need_no_further_word(dynamic: Bundle, tmp_path: Path) -> None:
    names, _ = default_runners(dynamic, "int8")
    assert [name.removesuffix("+kernels") for name in names] == ["openvino"]
    with open_runners(names, dynamic, precision="int8") as runners:
        (runner,) = check_parity(dynamic, runners).runners
    verdicts = {check.name: check.verdict for check in runner.checks}
    assert (verdicts["numeric"], verdicts["calibration"]) == ("passed", "passed")
    options = RepositoryOptions(runner=RunnerName("openvino", "int8"))
    repository_from_bundle(dynamic, tmp_path / "r", options)
    program = OpenVinoProgram(tmp_path / "r" / options.network / "1" / "model.onnx", hint="f32")
    assert program.quantization == {DYNAMIC: str(DYNAMIC_COLUMNS)}


@pytest.mark.integration
@pytest.mark.skipif(not has_vnni(), reason="without VNNI, OpenVINO computes the products in float32")
@pytest.mark.parametrize(("width", "quantised"), [(64, True), (100, True), (192, True), (48, False)])
def test_openvino_quantises_the_activations_as_the_emulation_does(width: int, quantised: bool, tmp_path: Path) -> None:
    """On one product: in a network, a value that is rounded to the next step changes all that follows."""
    weight = np.random.default_rng(1).standard_normal((width, 40), dtype=np.float32)
    product = small_graphs.graph("y = MatMul(x, w)", x=f"batch, 5, {width}", y="batch, 5, 40", w=weight)
    declare(product.graph[0], "projection")
    graph = quantize_graph(product, "int8", None)
    ir.save(graph, tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((2, 5, width), dtype=np.float32)
    answers = OpenVinoProgram(tmp_path / "model.onnx", hint="f32").run(x)
    emulated = emulated_logits(graph, x, name="the product")
    graph.metadata_props.clear()
    plain = emulated_logits(graph, x, name="the product")
    assert np.abs(answers - emulated).max() < 1e-4
    assert bool(np.abs(answers - plain).max() > 1e-2) is quantised


@pytest.mark.integration
def test_a_network_of_convolutions_is_refused() -> None:
    graph = small_graphs.graph("y = Relu(x)")
    with pytest.raises(ExportError, match="this network has no other projection") as caught:
        quantize_graph(graph, "int8", None)
    assert "--calibration" in caught.value.hint
