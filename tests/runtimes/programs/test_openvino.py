"""OpenVINO on the CPU gives the model's answers, in exactly the requested precision."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import Variant
from gmmvit_deploy.errors import BundleError, InputError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs.quantize import activations_of, projections_of, quantize_graph
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.onnxruntime_program import OnnxRuntimeProgram
from gmmvit_deploy.inference.openvino_program import CHUNK, CHUNK_OF_LARGE, OpenVinoProgram
from gmmvit_deploy.inference.precision import SPECS
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.runtimes.engines.flavors import visible_gpu
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_onnx
from gmmvit_deploy.runtimes.programs.openvino_times import projection_gains, relative_time
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.open import open_runner, open_runners
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.conftest import golden, has_bf16
from tests.exact import exact_logits
from tests.models.families.small_models import distinct_model, random_images
from tests.models.families.small_specs import small_spec
from tests.runtimes.test_random_cases import spec_of

needs_bf16 = pytest.mark.skipif(not has_bf16(), reason="this CPU has no bf16")


def test_blocks_are_compared_in_openvino(bundle: Bundle) -> None:
    with open_runner("openvino", bundle) as runner:
        (report,) = check_parity(bundle, [runner], ParityOptions(localize=True)).runners
    localize = report.check("localize")
    assert localize.summary.startswith("all ")
    assert localize.summary.endswith("blocks are within tolerance")
    assert localize.details["graph"] == "model.onnx in OpenVINO"
    assert "f32" in report.provenance["kernels"]
    assert "bf16" not in report.provenance["kernels"]


@needs_bf16
def test_bf16_is_bf16(bundle: Bundle) -> None:
    with open_runner("openvino", bundle, precision="bf16") as runner:
        assert isinstance(runner, OpenVinoRunner)
        products = [name for name in runner.program.kernels if name.startswith("FullyConnected")]
        assert products
        assert all("bf16" in name for name in products)
        inputs = fresh_inputs(bundle, 4)
        with open_runner("openvino", bundle) as exact:
            difference = np.abs(runner.run(inputs) - exact.run(inputs)).max()
    assert difference > 1e-4  # bf16 rounds; a silent float32 would not differ


@pytest.mark.integration
@pytest.mark.parametrize(
    "spec",
    [
        replace(small_spec("vit"), image_size=8, heads=5),  # 4 patches of 4 × 4 pixels, and the class token
        TimmSpec(
            architecture="vit_tiny_patch16_224",
            model_args={"img_size": 16, "patch_size": 8, "embed_dim": 40, "depth": 2, "num_heads": 5, "qk_norm": True},
            image_size=16,
            classes=10,
            mask=MaskSpec(),
        ),
        spec_of("cait-spt-lsa", {"image_size": 4, "heads": 1, "head_dim": 1}),
    ],
    ids=["vit", "qk_norm", "one query of one head"],
)
@pytest.mark.first(1)
def test_as_many_tokens_as_heads(spec: ModelSpec, tmp_path: Path) -> None:
    """OpenVINO's own kernel of these attentions, a snippet, overwrites queries before it has read them."""
    model, images, path = distinct_model(spec), random_images(spec, 9), tmp_path / "model.onnx"
    ir.save(onnx_from_model(fold(model).model, preprocessing=None, max_batch=9), path)
    exact = exact_logits(model, images)
    with torch.inference_mode():
        error = model(torch.from_numpy(images)).numpy() - exact
    noise = Noise(largest=float(np.abs(error).max()), rms=0.0, scale=float(np.abs(exact).max()))
    for precision in ("fp32", "bf16") if has_bf16() else ("fp32",):
        program = OpenVinoProgram(str(path), hint=SPECS[precision].openvino)
        limit = limit_from_noise(noise, precision).largest
        for rows in (1, 9):
            np.testing.assert_allclose(program.run(images[:rows]), exact[:rows], rtol=0, atol=limit, err_msg=precision)


@pytest.mark.first(2)
@pytest.mark.parametrize(("threads", "chunk"), [(2, 2), (1, 8), (4, 2), (1, 1), (1, 32)])
def test_every_division_of_a_batch_gives_the_same_logits(threads: int, chunk: int, bundle: Bundle) -> None:
    """With four cores, 7 images are shared, 10 are 2 for each core and 2 shared, and 11 are 3, 3, 3 and 2."""
    program = OpenVinoProgram(str(bundle.onnx_path), hint="f32", threads=threads, chunk=chunk)
    other = OnnxRuntimeProgram(
        lambda count: session_from_onnx(bundle.onnx_path, threads=count), threads=threads, chunk=chunk
    )
    inputs = fresh_inputs(bundle, max(11, 2 * chunk + 3))
    expected = np.concatenate([program.run(inputs[row : row + 1]) for row in range(len(inputs))])
    for rows in (*range(1, 12), len(inputs)):
        for each in (program, other):
            np.testing.assert_allclose(each.run(inputs[:rows]), expected[:rows], atol=1e-5)
    assert max(size for size, streams in program._requests if streams > 1 or threads == 1) == chunk


@pytest.mark.integration
def test_threads_may_call_openvino_once_a_program_is_open(bundle: Bundle) -> None:
    code = (
        "import sys, threading, openvino\n"
        "from gmmvit_deploy.inference.openvino_program import OpenVinoProgram\n"
        "OpenVinoProgram(sys.argv[1], hint='f32')\n"
        "sys.setswitchinterval(1e-6)\n"
        "together = threading.Barrier(2)\n"
        "def call():\n"
        "    together.wait(); openvino.Type.f32.to_dtype()\n"  # hangs if these are the first calls of a process
        "threads = [threading.Thread(target=call) for _ in range(2)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    subprocess.run([sys.executable, "-c", code, str(bundle.onnx_path)], check=True, timeout=120)


def test_what_is_prepared_need_not_be_compiled_later(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    program = OpenVinoProgram(str(bundle.onnx_path), hint="f32")
    program.prepare(3 * CHUNK)

    def refuse(compiled: object) -> None:
        raise AssertionError("compiled while a request waits")

    monkeypatch.setattr(program, "_require_hint", refuse)
    inputs = fresh_inputs(bundle, 3 * CHUNK)
    for rows in range(1, 3 * CHUNK + 1):
        assert program.run(inputs[:rows]).shape[0] == rows
    with pytest.raises(AssertionError, match="compiled while"):
        program._prepared(CHUNK, 7)  # so the assertion above can fail


@pytest.mark.parametrize(("tokens", "rows"), [(128, CHUNK_OF_LARGE), (64, CHUNK)], ids=["large", "few tokens"])
def test_a_large_network_is_compiled_for_fewer_rows_as_each_size_has_its_own_copy_of_the_weights(
    tokens: int, rows: int
) -> None:
    import openvino
    from openvino import opset13 as ops

    generator = np.random.default_rng(0)
    weights = generator.standard_normal((400, 25_000), dtype=np.float32)
    images = ops.parameter([-1, tokens, 400], openvino.Type.f32)
    mean = ops.reduce_mean(ops.matmul(images, ops.constant(weights), False, False), np.array([1]))
    program = OpenVinoProgram(openvino.Model([mean], [images]), hint="f32", threads=1)
    program.prepare(64)
    assert max(size for size, _ in program._requests) == program.chunk == rows
    batch = generator.standard_normal((3, tokens, 400), dtype=np.float32)
    np.testing.assert_allclose(program.run(batch), batch.mean(1) @ weights, atol=1e-3)


def test_a_graph_that_cannot_be_read(bundle: Bundle, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"broken.onnx: OpenVINO .* cannot load the graph"):
        OpenVinoRunner(bundle, Variant(precision="fp32", path=broken, sha256="", record=None))


def test_runners_with_a_precision_behind_the_name(precise_bundle: Bundle) -> None:
    names = ["onnxruntime", "onnxruntime:int8", "openvino"]
    with open_runners(names, precise_bundle) as runners:
        assert [(runner.name, runner.precision) for runner in runners] == [
            ("onnxruntime", "fp32"),
            ("onnxruntime", "int8"),
            ("openvino", "fp32"),
        ]
    for wrong, message in (
        (["openvino:fp32-static"], "fp32 has no form 'static'"),
        (["openvino", "openvino:fp32"], "openvino is named more than once"),
    ):
        with pytest.raises(InputError, match=message), open_runners(wrong, precise_bundle):
            pass


@pytest.mark.nightly
def test_the_compiled_module(tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles["vit_gmm"]
    case = golden("vit_gmm")
    with open_runner("compile", bundle) as runner:
        np.testing.assert_allclose(runner.run(case.inputs), case.logits, rtol=0, atol=case.atol)


@pytest.mark.skipif(visible_gpu() is not None, reason="a GPU is here")
def test_runners_of_a_gpu_that_is_not_here(bundle: Bundle) -> None:
    for name in ("eager-gpu", "compile-gpu"):
        with pytest.raises(InputError, match=f"runner {name}: PyTorch .* sees no GPU"):
            open_runner(name, bundle)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eager-gpu", "compile-gpu"])
def test_the_module_on_a_gpu(name: str, bundle: Bundle) -> None:
    with open_runner(name, bundle) as runner:
        report = check_parity(bundle, [runner], ParityOptions())
        assert (runner.name, runner.device) == (name, "gpu")
    assert report.passed, report.failures()


def test_without_a_compiler(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def refuse(*_: object, **__: object) -> object:
        def fail(*_: object) -> None:
            raise RuntimeError("no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(InputError, match="fails on this machine: no compiler") as caught:
        open_runner("compile", bundle)
    assert "g++" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "saturates"),
    [
        ("flags\t\t: fpu avx2 fma", True),
        ("flags\t\t: fpu avx512f avx512bw", True),
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx2 avx_vnni", False),
        ("Features\t: fp asimd asimddp", False),
    ],
)
def test_int8_saturates_on_x86_without_vnni(tmp_path: Path, line: str, saturates: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    reason = int8_saturates(tmp_path / "cpuinfo")
    assert ("no VNNI" in reason) is saturates
    assert bool(reason) is saturates


# ---- what int8 gains in each projection ------------------------------------------------------------------------------


def test_each_product_is_found_in_the_profile(bundle: Bundle) -> None:
    plain = ir.load(bundle.onnx_path)
    quantized = quantize_graph(plain, "int8", dict.fromkeys(activations_of(plain.graph), (-8.0, 8.0)))
    batch, projections = bundle.golden_set().inputs[:2], projections_of(plain.graph)
    gains = projection_gains(plain, quantized, projections, batch)
    assert list(gains) == [node.name for node in projections]
    assert any(gains.values())
    assert gains["blocks.0.mlp.0/MatMul"] == gains["blocks.1.mlp.0/MatMul"]  # of the same shape
    assert relative_time(plain, quantized, batch) > 0
