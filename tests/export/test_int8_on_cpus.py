"""In int8, a bundle has a graph for GPUs and a graph for CPUs, and every reader takes the graph of its device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from gmmvit_deploy.artifacts import Bundle, open_bundle
from gmmvit_deploy.doctor import examine_bundle
from gmmvit_deploy.errors import BundleError, OutputError
from gmmvit_deploy.export.variants import graph_from_model, variant_from_bundle
from gmmvit_deploy.families import FAMILIES, model_from_spec
from gmmvit_deploy.kernels.onnxruntime_kernels import with_fused_attention
from gmmvit_deploy.parity.calibration import check_calibration
from gmmvit_deploy.runners.open import open_runner
from gmmvit_deploy.runtime.image_batches import open_images
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.specs import MaskSpec, input_shape
from gmmvit_deploy.variants import onnx_file, open_variant, recorded_errors
from gmmvit_deploy.writing import sha256_of_file

GPU, CPU = "model.int8.onnx", "model.int8.cpu.onnx"


@pytest.fixture
def copied(precise_bundle: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(precise_bundle.path, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


def float_types(graph: onnx.GraphProto) -> set[int]:
    kinds = {constant.data_type for constant in graph.initializer}
    kinds |= {node.attribute[0].i for node in graph.node if node.op_type == "Cast"}
    return kinds & {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def test_the_graph_for_cpus_has_the_form_of_the_float32_graph(precise_bundle: Bundle) -> None:
    gpu, cpu = (open_variant(precise_bundle, "int8", for_cpu=for_cpu) for for_cpu in (False, True))
    assert (gpu.path.name, gpu.for_cpu) == (GPU, False)
    assert (cpu.path.name, cpu.for_cpu) == (CPU, True)
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


def test_only_int8_has_a_graph_for_cpus(precise_bundle: Bundle) -> None:
    for precision in ("fp32", "fp16", "bf16", "fp8"):
        assert onnx_file(precision, for_cpu=True) == onnx_file(precision)
        assert not open_variant(precise_bundle, precision, for_cpu=True).for_cpu
    assert sorted(path.name for path in precise_bundle.path.glob("*.cpu.*")) == [CPU]


@pytest.mark.export
@pytest.mark.parametrize("family", ["cait", "deepvit"])
def test_our_kernel_computes_mixed_heads_in_int8(family: str) -> None:
    """In the form for GPUs, the mixing of heads is written as wider heads, which is several times the work."""
    torch.manual_seed(0)
    (spec,) = [each.small(MaskSpec()) for each in FAMILIES if each.name == family]
    model = model_from_spec(spec).eval()
    images = np.random.default_rng(0).standard_normal((4, *input_shape(spec)), dtype=np.float32)
    taken = []
    for for_cpu in (True, False):
        made = graph_from_model(model, "int8", preprocessing=None, max_batch=4, calibration=[images], for_cpu=for_cpu)
        taken.append(with_fused_attention(made.proto)[1])
    plain = graph_from_model(model, "fp32", preprocessing=None, max_batch=4)
    assert taken == [with_fused_attention(plain.proto)[1], 0]
    assert taken[0] > 0


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime+kernels", "openvino", "openvino+kernels"])
def test_runners_on_a_cpu_run_the_graph_for_cpus(name: str, precise_bundle: Bundle) -> None:
    with closing(open_runner(name, precise_bundle, precision="int8")) as runner:
        assert runner.graph is not None
        assert runner.graph.path.name == CPU
        logits = runner.run(precise_bundle.golden_set().inputs)
    errors = recorded_errors(precise_bundle, "int8", for_cpu=True)
    assert errors is not None
    assert np.abs(logits - precise_bundle.golden_set().logits).max() <= 4 * errors["largest_abs"]


def test_each_graph_has_its_own_errors_and_bounds(copied: Bundle) -> None:
    path = copied.path / "model.int8.json"
    data = json.loads(path.read_text())
    data["cpu"]["golden"]["largest_abs"] = 123.0
    data["cpu"]["calibration"]["bounds"] = {
        name: 20 * bound for name, bound in data["cpu"]["calibration"]["bounds"].items()
    }
    path.write_text(json.dumps(data))
    largest = [recorded_errors(copied, "int8", for_cpu=for_cpu)["largest_abs"] for for_cpu in (False, True)]
    assert largest == [data["golden"]["largest_abs"], 123.0]
    pixels = np.random.default_rng(5).integers(0, 256, (16, *copied.manifest.image.pixels_shape), dtype=np.uint8)
    batches = [copied.inputs_from_pixels(pixels)]
    checks = [check_calibration(copied, "int8", batches, for_cpu=for_cpu) for for_cpu in (False, True)]
    assert [check.verdict for check in checks] == ["passed", "failed"]


@pytest.mark.parametrize(
    ("options", "file"),
    [
        (RepositoryOptions(precision="int8"), CPU),
        (RepositoryOptions(precision="int8", runtime="openvino"), CPU),
        (RepositoryOptions(precision="int8", backend="onnxruntime"), CPU),
        (RepositoryOptions(precision="int8", backend="onnxruntime", accelerator="cuda"), GPU),
    ],
)
def test_a_repository_has_the_graph_of_its_device(
    options: RepositoryOptions, file: str, precise_bundle: Bundle, tmp_path: Path
) -> None:
    repository_from_bundle(precise_bundle, tmp_path / "r", options)
    network = tmp_path / "r" / options.network
    assert (network / "1" / "model.onnx").read_bytes() == (precise_bundle.path / file).read_bytes()
    # Without this level, the server's own ONNX Runtime would use products that saturate on a CPU without VNNI.
    basic = options.backend == "onnxruntime" and file == CPU
    assert ("level: -1" in (network / "config.pbtxt").read_text()) == basic


def as_an_earlier_version(bundle: Bundle) -> None:
    path = bundle.path / "model.int8.json"
    data = json.loads(path.read_text())
    del data["cpu"]
    path.write_text(json.dumps(data))
    (bundle.path / CPU).unlink()


def test_a_bundle_of_an_earlier_version_still_runs(copied: Bundle) -> None:
    as_an_earlier_version(copied)
    variant = open_variant(copied, "int8", for_cpu=True)
    assert (variant.path.name, variant.for_cpu) == (GPU, False)
    assert recorded_errors(copied, "int8", for_cpu=True) == recorded_errors(copied, "int8", for_cpu=False)
    checks = {check.name: check for check in examine_bundle(copied, None)}
    assert checks[GPU].works
    assert f"CPUs run {GPU} slowly; type gmmvit convert {copied.path} --precision int8" in checks[CPU].detail


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "the file is missing: expected the file that model.int8.json describes"),
        (lambda path: path.write_bytes(b"x"), "the file was changed or damaged: expected the file that"),
    ],
)
def test_a_graph_for_cpus_that_is_not_whole(damage: Callable[[Path], object], message: str, copied: Bundle) -> None:
    damage(copied.path / CPU)
    with pytest.raises(BundleError, match=message) as caught:
        open_variant(copied, "int8", for_cpu=True)
    assert f"{CPU}: " in str(caught.value)
    assert "--precision int8 --force" in caught.value.hint
    assert not {check.name: check for check in examine_bundle(copied, None)}[CPU].works
    open_variant(copied, "int8")  # the graph for GPUs is whole


def test_an_existing_graph_for_cpus_is_kept(copied: Bundle, calibration_images: Path) -> None:
    (copied.path / GPU).unlink()
    before = (copied.path / CPU).read_bytes()
    with pytest.raises(OutputError, match=r"model\.int8\.cpu\.onnx exists"):
        variant_from_bundle(copied, "int8", calibration=open_images(copied, str(calibration_images), limit=4))
    assert (copied.path / CPU).read_bytes() == before
    assert not (copied.path / GPU).exists()
