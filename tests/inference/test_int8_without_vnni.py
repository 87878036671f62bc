"""ONNX Runtime's products of int8 are right on a CPU without VNNI, which an emulator (QEMU) stands for."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gmmvit_deploy.inference import onnxruntime_program

EMULATOR = "qemu-x86_64"
INPUTS, OUTPUTS = 256, 32
PROGRAM = """
import sys
sys.path[:0] = sys.argv[4:]
import numpy as np
import onnxruntime
if sys.argv[3] == "ours":
    from gmmvit_deploy.inference import onnxruntime_program
    onnxruntime_program.has_vnni = lambda: False  # in the emulator, the list of CPUs is that of the real CPU
    options = onnxruntime_program.session_options(1)
else:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if sys.argv[3] == "basic":
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
np.save(sys.argv[2], session.run(None, {"x": np.load(sys.argv[2])})[0])
"""


def quantised_product(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write x W with a Q/DQ pair on both; return (x, the product).  Sums of pairs of its products exceed 16 bits."""
    generator = np.random.default_rng(0)
    weights = generator.integers(100, 128, (INPUTS, OUTPUTS)).astype(np.int8)
    scales = np.full(OUTPUTS, 0.01, np.float32)
    constants = {"w": weights, "w_scale": scales, "w_zero": np.zeros(OUTPUTS, np.int8)}
    constants |= {"x_scale": np.float32(0.02), "x_zero": np.int8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "x_scale", "x_zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["dw"], axis=1),
        helper.make_node("MatMul", ["d", "dw"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, OUTPUTS])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    x = (generator.integers(90, 128, (4, INPUTS)) * 0.02).astype(np.float32)
    return x, x.astype(np.float64) @ (weights * 0.01)


@pytest.mark.parametrize("vnni", [True, False, None])
def test_the_setting_is_for_cpus_without_vnni(vnni: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_program, "has_vnni", lambda: vnni)
    options = onnxruntime_program.session_options(1)
    if vnni:
        with pytest.raises(RuntimeError, match="does not have configuration"):
            options.get_session_config_entry("session.x64quantprecision")
    else:  # also if the list of CPUs does not say
        assert options.get_session_config_entry("session.x64quantprecision") == "1"


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only products of x86-64 saturate")
@pytest.mark.parametrize("options", ["ours", "basic", "usual"])
def test_products_of_int8_without_vnni(options: str, tmp_path: Path) -> None:
    """options: this project's, those of a repository for Triton's own ONNX Runtime backend, or ONNX Runtime's."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"no {EMULATOR} here; Debian has it in the package qemu-user")
    x, expected = quantised_product(tmp_path / "product.onnx")
    np.save(tmp_path / "values.npy", x)
    subprocess.run(
        [
            *(EMULATOR, "-cpu", "Haswell", Path(sys.executable).resolve(), "-c", PROGRAM),
            *(tmp_path / "product.onnx", tmp_path / "values.npy", options, *filter(None, sys.path)),
        ],
        check=True,
        timeout=300,
    )
    off = np.abs(np.load(tmp_path / "values.npy") - expected).max() / np.abs(expected).max()
    if options == "usual":  # if this fails, ONNX Runtime no longer needs our options
        assert off > 0.1
    else:
        assert off < 1e-6
