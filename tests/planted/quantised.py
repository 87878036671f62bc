"""Faults of the int8 graph of ``vit_gmm`` for CPUs: what goes wrong in a conversion, one at a time.

A fault changes the constants (name → values) and the nodes of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

Constants = dict[str, np.ndarray]
Fault = Callable[[Constants, onnx.GraphProto], None]

_HEAD, _POSITIONS = "model.head.weight", "model.position_embedding"
_MASK = "model.blocks.1.attention.scores.before.mask.constant"
_NORM = "model.blocks.1.mlp_norm"
_FIRST, _SECOND = "blocks.1.mlp.0/MatMul", "blocks.1.mlp.2/MatMul"


def _node(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.name == name)


def _weight(graph: onnx.GraphProto, projection: str) -> str:
    return _node(graph, projection).input[1].removesuffix(".dequantized")


def values(name: str, change: Callable[[np.ndarray], Any]) -> Fault:
    """Change a constant."""

    def fault(constants: Constants, graph: onnx.GraphProto) -> None:
        constants[name] = np.asarray(change(constants[name])).astype(constants[name].dtype)

    return fault


def weight(change: Callable[[np.ndarray], np.ndarray], part: str = "quantized", of: str = _FIRST) -> Fault:
    """Change a part of a quantised weight: its integers (in, out), or the scales of its rows."""

    def fault(constants: Constants, graph: onnx.GraphProto) -> None:
        values(f"{_weight(graph, of)}.{part}", change)(constants, graph)

    return fault


def attribute(node: str, name: str, value: Any) -> Fault:
    def fault(constants: Constants, graph: onnx.GraphProto) -> None:
        found = _node(graph, node)
        kept = [stated for stated in found.attribute if stated.name != name]
        del found.attribute[:]
        found.attribute.extend([*kept, helper.make_attribute(name, value)])

    return fault


def exchanged(one: str, other: str, parts: tuple[str, ...] = ("quantized", "scale")) -> Fault:
    """Exchange the weights of two projections of the same shape."""

    def fault(constants: Constants, graph: onnx.GraphProto) -> None:
        for part in parts:
            first, second = (f"{_weight(graph, name)}.{part}" for name in (one, other))
            constants[first], constants[second] = constants[second], constants[first]

    return fault


def rewired(constants: Constants, graph: onnx.GraphProto) -> None:
    """A projection reads the weight of another layer."""
    _node(graph, _FIRST).input[1] = _node(graph, "blocks.0.mlp.0/MatMul").input[1]


def norm_bypassed(constants: Constants, graph: onnx.GraphProto) -> None:
    """The residual is quantised in place of its norm."""
    norm = _node(graph, "blocks.1.mlp_norm/LayerNormalization")
    _node(graph, f"{_FIRST}/QuantizeLinear").input[0] = norm.input[0]


def scale_only(constants: Constants, graph: onnx.GraphProto) -> None:
    """Smoothing divides the scale of a norm, and forgets its shift and the weights."""
    constants[f"{_NORM}.weight"][::3] /= 4


def half_smoothed(constants: Constants, graph: onnx.GraphProto) -> None:
    """Smoothing divides a norm, and forgets the weights."""
    for part in ("weight", "bias"):
        constants[f"{_NORM}.{part}"][::3] /= 4


def lower_end(constants: Constants, graph: onnx.GraphProto) -> None:
    """The lower end of a range is 0: the step and the zero point of the upper end alone."""
    step, zero = (constants[f"{_SECOND}.input.{part}"] for part in ("scale", "zero"))
    constants[f"{_SECOND}.input.scale"] = np.asarray(step * (255 - zero.astype(np.float32)) / 255, np.float32)
    constants[f"{_SECOND}.input.zero"] = np.zeros_like(zero)


def shuffled(array: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(array.ravel()).reshape(array.shape)


def column(number: int, change: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Change a column of a matrix."""

    def changed(array: np.ndarray) -> np.ndarray:
        out = array.astype(np.float64)
        out[..., number] = change(out[..., number])
        return np.clip(np.rint(out), -127, 127) if array.dtype == np.int8 else out

    return changed


def row(number: int, change: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: column(number, change)(array.T).T


def one_value(array: np.ndarray) -> np.ndarray:
    """Flip the second highest bit of a value."""
    out = array.copy()
    out[5, 7] ^= 64
    return out


FAULTS: dict[str, tuple[Fault, str]] = {
    "the head is zero": (values(_HEAD, np.zeros_like), _HEAD),
    "the head's bias is zero": (values("model.head.bias", np.zeros_like), "model.head.bias"),
    "two classes are exchanged": (values(_HEAD, lambda head: head[[1, 0, *range(2, len(head))]]), _HEAD),
    "the head is scaled": (values(_HEAD, lambda head: head * 1.02), _HEAD),
    "no position embedding": (values(_POSITIONS, np.zeros_like), _POSITIONS),
    "positions in another order": (values(_POSITIONS, lambda grid: grid[:, ::-1]), _POSITIONS),
    "the patch embedding's bias": (values("model.patch_embedding.project.bias", np.zeros_like), "project.bias"),
    "the image's mean": (values("mean", lambda mean: mean[::-1] + 3), "its constant mean"),
    "no mask": (values(_MASK, np.ones_like), _MASK),
    "masks of two heads": (values(_MASK, lambda mask: mask[::-1]), _MASK),
    "a mask transposed": (values(_MASK, lambda mask: mask.transpose(0, 2, 1) * 1.001), _MASK),
    "a bias is zero": (values("model.blocks.0.mlp.0.bias", np.zeros_like), "model.blocks.0.mlp.0.bias"),
    "a bias off by one channel": (values("model.blocks.2.mlp.2.bias", lambda b: np.roll(b, 1)), "mlp.2.bias"),
    "a norm's shift": (values(f"{_NORM}.bias", lambda shift: shift + 0.01), f"{_NORM}.bias"),
    "epsilon × 10": (attribute("blocks.1.mlp_norm/LayerNormalization", "epsilon", 1e-4), "expected epsilon 9.99"),
    "the last norm's epsilon": (attribute("head_norm/LayerNormalization", "epsilon", 1e-6), "expected epsilon 9.99"),
    "GELU by tanh": (attribute("blocks.1.mlp.1/Gelu", "approximate", "tanh"), "expected approximate 'none'"),
    "softmax over another axis": (attribute("blocks.1.attention/Softmax", "axis", 1), "expected axis -1, got 1"),
    "heads in another order": (attribute("blocks.1.attention/Transpose.2", "perm", [0, 1, 2, 3]), "expected perm"),
    "shuffled weights": (weight(shuffled), _FIRST),
    "weights are zero": (weight(np.zeros_like), _FIRST),
    "weights of another sign": (weight(np.negative), _FIRST),
    "an output channel of another sign": (weight(column(11, np.negative)), "output channel 11"),
    "an output channel × 1.1": (weight(column(11, lambda rows: rows * 1.1)), "output channel 11"),
    "an output channel is zero": (weight(column(0, np.zeros_like)), "output channel 0"),
    "two output channels are exchanged": (
        weight(lambda array: array[:, [1, 0, *range(2, array.shape[1])]]),
        "output channel 0 is not the trained weight, nor those of 1 more",
    ),
    "an input channel of another sign": (weight(row(3, np.negative)), "channel"),
    "two input channels are exchanged": (weight(lambda array: array[[1, 0, *range(2, len(array))]]), _FIRST),
    "a bit of a value": (weight(one_value), "output channel 7"),
    "integers of four bits": (weight(lambda array: np.rint(array / 16) * 16), _FIRST),
    "integers rounded down": (weight(lambda array: np.clip(array.astype(int) - 1, -127, 127)), "steps on average"),
    "a weight transposed": (weight(np.transpose, of="blocks.1.attention.out/MatMul"), "blocks.1.attention.out/MatMul"),
    "two layers are exchanged": (exchanged(_FIRST, "blocks.2.mlp.0/MatMul"), _FIRST),
    "a scale × 1.04": (weight(column(4, lambda scale: scale * 1.04), "scale"), ".scale is"),
    "all scales × 1.04": (weight(lambda scales: scales * 1.04, "scale"), ".scale is"),
    "scales of the next channel": (weight(lambda scales: np.roll(scales, 1), "scale"), ".scale is"),
    "a zero point of a weight": (weight(lambda zeros: zeros + 3, "zero"), ".zero is 3"),
    "the weight of another layer": (rewired, f"{_FIRST}: expected the inputs"),
    "a norm is left out": (norm_bypassed, f"{_FIRST}/QuantizeLinear: expected the inputs"),
    "smoothing of a scale": (scale_only, f"{_NORM}.weight"),
    "smoothing without weights": (half_smoothed, f"{_NORM}.weight"),
    "a range's zero point": (values(f"{_SECOND}.input.zero", lambda zero: zero + 40), f"{_SECOND}/QuantizeLinear"),
    "a range's lower end": (lower_end, "its input saturates outside 0 to"),
    "a range's step × 1.04": (values(f"{_SECOND}.input.scale", lambda step: step * 1.04), "its input saturates"),
    "a range cut to a third": (values(f"{_FIRST}.input.scale", lambda step: step / 3), "its input saturates"),
}
"""What is wrong → (the fault, words of the sentence that names it)."""
