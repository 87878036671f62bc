"""Our attention kernel in ONNX Runtime: the same answers, and no other form of attention is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.specs import MaskKind
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.runtimes.kernels import libraries as kernel_libraries
from gmmvit_deploy.runtimes.kernels.libraries import onnxruntime_library
from gmmvit_deploy.runtimes.kernels.onnxruntime_kernels import with_fused_attention
from gmmvit_deploy.runtimes.programs import onnxruntime as runtime_module
from gmmvit_deploy.runtimes.programs.onnxruntime import fused_graph, program_from_onnx
from gmmvit_deploy.runtimes.programs.onnxruntime_program import why_not
from gmmvit_deploy.runtimes.runners.open import open_runner
from tests.conftest import swin_graph
from tests.runtimes.kernels.test_masked_attention import needs_kernel

HEADS, N, WIDTH = 2, 20, 16


def attentions(graph: onnx.GraphProto) -> int:
    return sum(node.op_type == "Softmax" for node in graph.node)


@pytest.mark.first(2)
@needs_kernel
@pytest.mark.parametrize(
    ("name", "ours", "left"),
    [
        *(("vit_gmm", 3, 0), ("cait_gmm", 5, 0), ("t2t_gmm", 2, 0), ("swin_gmm", 4, 0), ("pit_gmm", 4, 0)),
        *(("vit_elm", 3, 0), ("sl_cait", 5, 0), ("deepvit_cnn_scaled", 4, 0), ("rmt_tiny_like", 6, 0)),
        ("eanet_performer", 0, 4),  # its attentions have no Q Kᵀ
    ],
)
def test_the_fused_graph_gives_the_same_answers(
    name: str, ours: int, left: int, tensor_bundles: dict[str, Bundle]
) -> None:
    bundle = tensor_bundles[name]
    fused, why = fused_graph(bundle.onnx_path)
    if not ours:
        assert fused is None
        assert why.startswith("our kernel takes no attention of this graph: 0 of ")
        assert "does not run over the keys" in why
        return
    assert fused is not None, why
    assert fused.attentions.startswith(f"{ours} of {ours + left}")
    proto = onnx.load_from_string(fused.graph)
    assert sum(node.domain == "gmmvit" for node in proto.graph.node) == ours
    assert attentions(proto.graph) == left
    # Each mask is stored once, in the form that the kernel reads, and no longer in its original form.
    before = onnx.load(bundle.onnx_path).graph.initializer
    constants = {tensor.name for tensor in proto.graph.initializer}
    assert constants.isdisjoint(record.constant for record in bundle.manifest.masks[-ours:])
    assert sum(len(tensor.raw_data) for tensor in proto.graph.initializer) <= 1.05 * sum(
        len(tensor.raw_data) for tensor in before
    )
    own, plain = program_from_onnx(bundle.onnx_path, fused=fused), program_from_onnx(bundle.onnx_path)
    for batch in (1, 5, 37):
        inputs = fresh_inputs(bundle, batch)
        np.testing.assert_allclose(own.run(inputs), plain.run(inputs), atol=2e-5)


@pytest.mark.rest
@needs_kernel
@pytest.mark.parametrize("kind", ["gmm", "plain"])
@pytest.mark.export
def test_windows_that_shift(kind: MaskKind, tmp_path: Path) -> None:
    path = swin_graph(tmp_path, kind)
    fused, why = fused_graph(path)
    assert fused is not None, why
    assert attentions(onnx.load_from_string(fused.graph).graph) == 0
    own, plain = program_from_onnx(path, fused=fused), program_from_onnx(path)
    images = np.random.default_rng(1).standard_normal((5, 3, 16, 16), dtype=np.float32)
    for batch in (1, 5):
        np.testing.assert_allclose(own.run(images[:batch]), plain.run(images[:batch]), atol=2e-5)


@needs_kernel
def test_the_runner_states_which_attention_it_has(
    tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tensor_bundles["vit_gmm"]
    with open_runner("onnxruntime+kernels", bundle) as runner:
        assert runner.settings["attention"] == "our own, f32"
        assert runner.settings["instruction set of our kernel"] in (
            "avx512-bf16",
            "avx512",
            "avx2",
            "neon-bf16",
            "neon",
        )
    with open_runner("onnxruntime", bundle) as runner:
        assert runner.settings["attention"] == "ONNX Runtime's"
    monkeypatch.setattr(runtime_module, "onnxruntime_library", lambda: (None, "switched off"))
    with pytest.raises(InputError, match=r"runner onnxruntime\+kernels cannot run here: switched off"):
        open_runner("onnxruntime+kernels", bundle)


def test_half_precision_is_left_alone(precise_bundle: Bundle) -> None:
    for precision in ("fp16", "int8"):
        assert with_fused_attention(onnx.load(open_variant(precise_bundle, precision).path))[1] == 0


# ---- what is replaced, and what is not ---------------------------------------------------------------------------


def graph(**other: Any) -> onnx.ModelProto:
    """Return a masked attention as the exporter writes it.  other: changes of the form."""
    d = other.get("d", WIDTH)
    kind = other.get("type", TensorProto.FLOAT)
    numpy_type = helper.tensor_dtype_to_np_dtype(kind)
    mask = np.random.default_rng(1).standard_normal(other.get("mask", (HEADS, N, N))).astype(numpy_type)
    windows = other.get("windows", [])
    constants = {
        "mask": mask,
        "apart": np.asarray([-1, *windows, N, HEADS, d]),
        "beside": np.asarray([-1, *windows, N, HEADS * d]),
        "scale": np.full(other.get("scale", ()), 0.25, numpy_type),
        "bias": np.random.default_rng(3).standard_normal(other.get("bias", ())).astype(numpy_type),
    }
    biased = [helper.make_node("Add", ["masked", "bias"], ["biased"])] if "bias" in other else []
    scaled = [helper.make_node("Mul", ["query", "scale"], ["scaled"])] if "scale" in other else []

    def turned(name: str, to: str, order: list[int]) -> onnx.NodeProto:
        inner = [place + len(windows) for place in order]
        return helper.make_node("Transpose", [name], [to], perm=[*range(1 + len(windows)), *inner])

    joined = bool(other.get("joined"))  # windows and heads in a single dimension, as in the int8 graphs of Swin
    if joined:
        constants["join"] = np.asarray([-1, windows[0] * HEADS, N, d])
        constants["part"] = np.asarray([-1, *other.get("parted", [windows[0], HEADS, N, d])])
        places = {"q": "query", "k": "key.joined", "v": "value"}
        turns = [
            *(turned(f"{name}.apart", f"{name}.turned", [2, 1, 3]) for name in places),
            *(helper.make_node("Reshape", [f"{name}.turned", "join"], [place]) for name, place in places.items()),
            helper.make_node("Transpose", ["key.joined"], ["key"], perm=[0, 1, 3, 2]),
        ]
    else:
        turns = [
            turned("q.apart", "query", [2, 1, 3]),
            turned("k.apart", "key", [2, 3, 1]),
            turned("v.apart", "value", [2, 1, 3]),
        ]
    parted = [helper.make_node("Reshape", ["mixed", "part"], ["parted"])] if joined else []
    nodes = [
        helper.make_node("Split", ["x"], ["q", "k", "v"], axis=2 + len(windows), num_outputs=3),
        *(helper.make_node("Reshape", [name, "apart"], [f"{name}.apart"]) for name in "qkv"),
        *turns,
        *scaled,
        helper.make_node("MatMul", ["scaled" if scaled else "query", "key"], ["scores"]),
        helper.make_node("Mul", ["mask", "scores"], ["masked"]),
        *biased,
        helper.make_node("Softmax", ["biased" if biased else "masked"], ["weights"], axis=other.get("axis", -1)),
        helper.make_node("MatMul", ["weights", "value"], ["mixed"]),
        *parted,
        turned("parted" if joined else "mixed", "back", [2, 1, 3]),
        helper.make_node("Reshape", ["back", "beside"], ["y"], name="last"),
        helper.make_node("Relu", ["y"], ["out"]),
    ]
    outputs = [helper.make_tensor_value_info("out", kind, ["batch", *windows, N, HEADS * d])]
    if other.get("weights_are_used"):
        nodes.append(helper.make_node("Relu", ["weights"], ["more"]))
        outputs.append(helper.make_tensor_value_info("more", kind, ["batch", *windows, HEADS, N, N]))
    shapes = {"x": 3 * HEADS * d, "q": HEADS * d, "k": HEADS * d, "v": HEADS * d, "y": HEADS * d}
    values = [helper.make_tensor_value_info(name, kind, ["batch", *windows, N, size]) for name, size in shapes.items()]
    first = helper.make_node("Identity", ["pixels"], ["x"])
    made = helper.make_graph(
        [first, *nodes],
        "attention",
        [helper.make_tensor_value_info("pixels", kind, ["batch", *windows, N, 3 * HEADS * d])],
        outputs,
        [numpy_helper.from_array(np.asarray(constant), name) for name, constant in constants.items()],
        value_info=[] if other.get("no_shapes") else values,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@needs_kernel
@pytest.mark.parametrize(
    ("other", "replaced"),
    [
        ({}, 1),
        ({"mask": ()}, 1),  # a plain attention's scale
        ({"mask": (1, HEADS, N, N)}, 1),
        ({"mask": (N, N)}, 1),  # all heads share the mask
        ({"mask": (1, N, N)}, 0),
        ({"mask": (HEADS, N, 1)}, 0),
        ({"d": 8}, 1),
        ({"d": 33, "bias": (N, N)}, 1),
        ({"bias": (HEADS, N, N)}, 1),
        ({"bias": (1, HEADS, N, N), "mask": ()}, 1),
        ({"bias": (1, N, N)}, 0),
        ({"bias": (3, HEADS, N, N)}, 0),  # a bias for each of three images
        ({"windows": [4]}, 1),
        ({"windows": [4], "mask": (1, 1, HEADS, N, N), "bias": (HEADS, N, N)}, 1),
        ({"windows": [4], "mask": (), "bias": (4, HEADS, N, N)}, 1),
        ({"windows": [4], "mask": (4, HEADS, N, N)}, 0),
        ({"windows": [4], "axis": 3}, 0),
        ({"windows": [4], "scale": (), "mask": (), "bias": (4, HEADS, N, N)}, 1),  # of Q alone
        ({"windows": [4], "joined": True, "mask": (), "bias": (4 * HEADS, N, N)}, 1),
        ({"windows": [4], "joined": True, "mask": (4 * HEADS, N, N)}, 0),  # another for each window
        ({"windows": [4], "joined": True, "mask": (), "parted": [2, 2 * HEADS, N, WIDTH]}, 0),
        ({"scale": (1, 1, 1, 1)}, 1),
        ({"scale": (HEADS, 1, 1)}, 0),  # another for each head
        ({"axis": 2}, 0),
        ({"weights_are_used": True}, 0),
        ({"no_shapes": True}, 0),
        ({"type": TensorProto.FLOAT16}, 0),
    ],
    ids=str,
)
def test_only_masked_attention_is_replaced(other: dict[str, Any], replaced: int) -> None:
    plain = graph(**other)
    before = plain.SerializeToString()
    model, count = with_fused_attention(plain)
    assert plain.SerializeToString() == before
    assert count == replaced
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MaskedAttention") == replaced
    assert ("Softmax" in kinds) == ("Split" in kinds) == (not replaced)
    kind = np.float16 if other.get("type") else np.float32
    shape = (3, *other.get("windows", []), N, 3 * HEADS * other.get("d", WIDTH))
    batch = np.random.default_rng(2).standard_normal(shape).astype(kind)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnxruntime_library()[0]))
    answers = [
        onnxruntime.InferenceSession(network.SerializeToString(), options).run(None, {"pixels": batch})[0]
        for network in (plain, model)
    ]
    np.testing.assert_allclose(answers[1], answers[0], atol=1e-5 if replaced else 0)
    if other.get("bias", ())[:1] != (3,):  # which cannot be broadcast over an empty batch
        no_rows = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"pixels": batch[:0]})[0]
        assert no_rows.shape == (0, *answers[0].shape[1:])


@needs_kernel
def test_another_shape_than_the_node_was_made_for_is_an_error() -> None:
    model, _ = with_fused_attention(graph())
    (node,) = [node for node in model.graph.node if node.op_type == "MaskedAttention"]
    for attribute in node.attribute:
        if attribute.name == "n":
            attribute.i = N + 1
    del model.graph.value_info[:]
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnxruntime_library()[0]))
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    with pytest.raises(Exception, match="has another shape than the node was made for"):
        session.run(None, {"pixels": np.zeros((1, N, 3 * HEADS * WIDTH), np.float32)})


# ---- where it is not available ---------------------------------------------------------------------------------


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, bundle: Bundle, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(kernel_libraries, "READY_FOLDER", tmp_path / "no ready-made library")
    kernel_libraries.onnxruntime_library.cache_clear()
    try:
        fused, why = fused_graph(bundle.onnx_path)
    finally:
        kernel_libraries.onnxruntime_library.cache_clear()
    assert fused is None
    assert why == "no C++ compiler: no-such-compiler is not installed; install g++, or set CXX to another compiler"


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    other = tmp_path / "onnxruntime_kernels.so"
    other.write_bytes(b"no library")
    assert why_not(other).startswith("onnxruntime_kernels.so cannot be loaded:")


def test_a_processor_without_it(monkeypatch: pytest.MonkeyPatch, bundle: Bundle) -> None:
    monkeypatch.setattr(runtime_module, "onnxruntime_library", lambda: (Path("some.so"), ""))
    why = "this processor has neither AVX2 and FMA nor the instructions of 64-bit ARM"
    monkeypatch.setattr(runtime_module, "why_not", lambda library: why)
    assert fused_graph(bundle.onnx_path) == (None, why)
