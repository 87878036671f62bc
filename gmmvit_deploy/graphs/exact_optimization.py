"""Optimise an exported graph with onnxscript, and keep the scalars that onnxscript takes for neutral elements.

    x + c, x − c        onnxscript removes the operation if |c| is at most 1e-8, such as the 1e-9 of x / (1e-9 + Σ x)
    x · f, x / f        onnxscript removes the operation if |f − 1| is at most 1e-5

Removing x + 0 and x · 1 changes nothing. Removing x + 1e-9 turns 0 / (0 + 1e-9) into 0 / 0. onnxscript compares only
scalars without dimensions. Before the optimisation, each such scalar that is not exactly neutral becomes a tensor with
the shape (1,), which onnxscript keeps and which computes the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir

_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
_NEAR = {"Add": 2e-8, "Sub": 2e-8, "Mul": 2e-5, "Div": 2e-5}
"""Operator → twice the largest distance from the neutral element at which onnxscript removes the operator."""


def optimize_exactly(model: ir.Model) -> None:
    """Optimise the graph with onnxscript in place, without loss of scalars.

    model: of the program that ``torch.onnx.export`` returns with ``optimize=False``, in which several values can have
    the same name. Each gets its own name, as a ModelProto needs.
    """
    from onnx_ir.passes.common import NameFixPass
    from onnxscript import optimizer

    NameFixPass()(model)
    # A scalar can be the result of constant nodes, such as a cast, or be inside a function of the graph.
    optimizer.inline(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    _keep_scalars(model.graph)
    optimizer.optimize(model)


def _keep_scalars(graph: Any) -> None:
    """Give each scalar that is nearly neutral, but not neutral, the shape (1,).

    A result without dimensions would get this shape as well, so its operator is left alone.
    """
    import onnx_ir as ir

    kept: dict[tuple[str, float], ir.Value] = {}
    for node in graph.all_nodes():
        shape = node.outputs[0].shape
        if node.domain or node.op_type not in _NEUTRAL or (shape is not None and not len(shape)):
            continue
        for index, value in enumerate(node.inputs):
            scalar = None if value is None else _nearly_neutral(value, node.op_type)
            if scalar is None:
                continue
            key = (scalar.dtype.name, float(scalar))
            if key not in kept:
                tensor = ir.tensor(scalar.reshape(1), name=f"nearly_neutral/{len(kept)}")
                kept[key] = ir.Value(
                    name=tensor.name, shape=ir.Shape([1]), type=ir.TensorType(tensor.dtype), const_value=tensor
                )
                graph.register_initializer(kept[key])
            node.replace_input_with(index, kept[key])


def _nearly_neutral(value: Any, operator: str) -> NDArray[Any] | None:
    """Return the floating-point scalar that the value holds, if it is near the neutral element but not equal to it."""
    import onnx_ir as ir

    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or len(tensor.shape) or not tensor.dtype.is_floating_point():
        return None
    scalar = tensor.numpy()
    return scalar if 0 < abs(float(scalar) - _NEUTRAL[operator]) <= _NEAR[operator] else None
