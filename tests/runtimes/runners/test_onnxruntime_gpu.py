"""The runners of ONNX Runtime on a GPU: what can be tested without a GPU runs the same code on another provider."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import BundleError, InputError, RunnerUnavailableError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.runtimes.programs import onnxruntime_providers
from gmmvit_deploy.runtimes.programs.onnxruntime_providers import (
    CPU,
    CUDA,
    TENSORRT,
    require_provider,
    session_on_providers,
)
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeGpuRunner, engine_cache, tensorrt_options
from gmmvit_deploy.runtimes.runners.open import open_runner, open_runners

NAMES = ("onnxruntime-cuda", "onnxruntime-tensorrt")
HAS_CUDA = CUDA in require_provider(CPU).get_available_providers()
needs_cpu_package = pytest.mark.skipif(HAS_CUDA, reason="needs onnxruntime, which has no CUDA and has Azure")


def on_cpu(bundle: Bundle, **settings: str) -> OnnxRuntimeGpuRunner:
    variant = open_variant(bundle, "fp32")
    return OnnxRuntimeGpuRunner(
        bundle, variant, name="onnxruntime-cuda", providers={CPU: {}}, settings=settings, device="cpu"
    )


def test_the_report_names_the_provider_of_each_node(bundle: Bundle) -> None:
    nodes = onnx.load(bundle.onnx_path).graph.node
    with on_cpu(bundle, TF32="off") as runner:
        report = check_parity(bundle, [runner], ParityOptions(localize=True))
        placement = runner.placement
    assert report.passed, report.failures()
    (result,) = report.to_json()["runners"]
    assert result["provenance"]["TF32"] == "off"
    counted = result["provenance"][f"nodes on {CPU}"]
    assert counted.startswith(f"{len(nodes)}: ")
    products = sum(node.op_type == "MatMul" for node in nodes)
    assert f"{products} MatMul" in counted
    assert {name for name, _ in placement.nodes[CPU]} == {node.name for node in nodes}
    assert report.runners[0].check("localize").verdict == "passed"


def test_bound_memory_gives_the_logits_of_the_plain_runner(bundle: Bundle) -> None:
    inputs = fresh_inputs(bundle, 5)
    with on_cpu(bundle) as bound, open_runner("onnxruntime", bundle) as plain:
        first = bound.run(inputs[:2])
        for batch in (inputs, inputs[:1], inputs[3:5]):
            np.testing.assert_allclose(bound.run(batch), plain.run(batch), atol=1e-5)
        np.testing.assert_array_equal(first, bound.run(inputs[:2]))  # no later run wrote into the first answer
        reversed_rows = bound.run(inputs[::-1])
        np.testing.assert_allclose(reversed_rows[::-1], bound.run(inputs), atol=1e-5)


@needs_cpu_package
@pytest.mark.parametrize("name", NAMES)
def test_the_package_for_cpus_has_no_such_provider(name: str, bundle: Bundle) -> None:
    with pytest.raises(RunnerUnavailableError, match=r"onnxruntime \S+ has no (CUDA|Tensorrt)Exec") as caught:
        open_runner(name, bundle)
    assert "pip uninstall -y onnxruntime" in caught.value.hint
    assert "'gmmvit-deploy[gpu]'" in caught.value.hint
    assert not (bundle.path / "engines").exists()


@needs_cpu_package
def test_onnx_runtime_that_drops_a_provider_is_refused(bundle: Bundle) -> None:
    """ONNX Runtime itself warns, and runs the whole graph on the CPU."""
    with pytest.warns(UserWarning, match="not in available"), pytest.raises(RunnerUnavailableError) as caught:
        session_on_providers(bundle.onnx_path.read_bytes(), "model.onnx", {CUDA: {}})
    assert "did not start CUDAExecutionProvider on this machine, and would have run the graph on the CPU" in str(
        caught.value
    )
    assert caught.value.hint == "type nvidia-smi to list the GPUs that the driver sees"


def gpu_package(folder: Path, linked: bytes, preloaded: list[str]) -> SimpleNamespace:
    """The parts of the package onnxruntime-gpu that are read before a session opens."""
    (folder / "capi").mkdir()
    for name in ("cuda", "tensorrt", "shared"):
        (folder / "capi" / f"libonnxruntime_providers_{name}.so").write_bytes(b"\x7fELF " + linked)
    return SimpleNamespace(
        __file__=str(folder / "__init__.py"),
        cuda_version="13.0",
        get_available_providers=lambda: [TENSORRT, CUDA, CPU],
        preload_dlls=lambda: preloaded.append("CUDA"),
    )


@pytest.mark.parametrize(
    ("provider", "reason", "hint"),
    [
        (CUDA, "libcublasLt.so.13: cannot open shared object file", "pip install 'gmmvit-deploy[gpu]'"),
        (CUDA, "libcuda.so.1: cannot open shared object file", "install NVIDIA's driver"),
        (TENSORRT, "libnvinfer.so.10: cannot open shared object file", "pip install 'tensorrt-cu13==10.*'"),
    ],
)
def test_a_library_that_is_missing(
    provider: str, reason: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preloaded: list[str] = []
    package = gpu_package(tmp_path, b"libnvinfer.so.10", preloaded)
    monkeypatch.setattr(onnxruntime_providers, "import_onnxruntime", lambda: package)
    monkeypatch.setattr(onnxruntime_providers, "installed_tensorrt", lambda: ("", ""))

    def refuse(path: str, **_: object) -> None:
        if ("tensorrt" if "nvinfer" in reason else "cuda") in Path(path).name:
            raise OSError(reason)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(RunnerUnavailableError, match=f"{provider} of .* cannot be loaded: {re.escape(reason)}") as got:
        require_provider(provider)
    assert hint in got.value.hint
    assert preloaded == ["CUDA"]


def test_tensorrt_11_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings of TensorRT 11 are installed wherever these tests run."""
    name, there = onnxruntime_providers.installed_tensorrt()
    assert there.startswith("11.")
    package = gpu_package(tmp_path, b"libnvinfer.so.10", [])
    monkeypatch.setattr(onnxruntime_providers, "import_onnxruntime", lambda: package)
    message = f"{TENSORRT} of .* needs TensorRT 10, and {name} {re.escape(there)} is installed"
    with pytest.raises(RunnerUnavailableError, match=message) as caught:
        require_provider(TENSORRT)
    assert "pip install 'tensorrt-cu13==10.*' in another environment" in caught.value.hint


def test_engines_are_stored_by_the_hash_of_the_graph(bundle: Bundle, tmp_path: Path) -> None:
    """ONNX Runtime itself would load the engine of other weights in a graph with the same names."""
    variant = open_variant(bundle, "fp32")
    folder = engine_cache(bundle, variant)
    assert folder.parent == bundle.path / "engines"
    assert variant.sha256[:16] in folder.name
    assert engine_cache(bundle, replace(variant, sha256="0" * 64)) != folder
    assert engine_cache(bundle, replace(variant, precision="fp16")) != folder
    options = tensorrt_options(bundle, tmp_path)
    shape = "x".join(map(str, bundle.input_shape))
    assert options["trt_profile_min_shapes"] == f"pixels:1x{shape}"
    assert options["trt_profile_max_shapes"] == f"pixels:{bundle.manifest.max_batch}x{shape}"
    assert options["trt_engine_cache_path"] == str(tmp_path)
    assert not {"trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable"} & options.keys()


def test_names_take_a_precision_and_no_engine(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="runner onnxruntime-cuda takes no engine"):
        open_runner("onnxruntime-cuda", bundle, engine=tmp_path)
    with (
        pytest.raises(BundleError, match=r"expected the graph graphs/fp16\.onnx"),
        open_runners(["onnxruntime-tensorrt:fp16"], bundle),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
class TestOnAGpu:
    def test_parity(self, name: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        if not HAS_CUDA:
            pytest.skip("onnxruntime-gpu is not installed")
        if name.endswith("tensorrt") and not onnxruntime_providers.installed_tensorrt()[0]:
            pytest.skip("TensorRT is not installed")
        with open_runner(name, bundle) as runner:
            report = check_parity(bundle, [runner], ParityOptions())
            nodes: Mapping[str, object] = runner.provenance()
        assert report.passed, report.failures()
        assert f"nodes on {CUDA if name.endswith('cuda') else TENSORRT}" in nodes
