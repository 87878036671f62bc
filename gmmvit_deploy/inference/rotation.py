"""Recognise what happens to Q and K between the split into heads and Q Kᵀ: a norm, and a rotation by the position.

    y = x̂ ∘ C + partner(x̂) ∘ S + D        x̂ = (x − mean(x)) / √(variance(x) + ε), or x

    C, S        the cosine and the sine of each token and column, which depend on the grid alone; 1 and 0 for tokens
                that are not rotated, such as the class token. The weight of a norm is a factor of both
    D           the bias of a norm, rotated; or 0
    partner     column 2i belongs to column 2i + 1; or, in the form of halves, column i to column i + d / 2

Networks write this in many forms: they cut off the tokens that are not rotated, turn the pairs of columns with Slice,
Concat, Reshape or Split, and scale before or after. All of them are linear in x̂, and a linear function is known by its
values: `rotation_of` evaluates the operators for a few inputs, reads C, S and D from the results, and checks them with
a random input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .openvino_view import Key, constant, inputs_of, key_of, kind_of, order_of, over_last_axis, shape_of


@dataclass(frozen=True, eq=False)
class Rotation:
    """The steps between the split into heads and Q Kᵀ.

    tables: C, S, and D unless it is 0: (2 or 3, heads or 1, tokens, head_dim), float32.
    halves: whether column i belongs to column i + d / 2.
    epsilon: ε of the norm, or None without a norm.
    """

    tables: Any
    halves: bool
    epsilon: float | None


def rotation_of(value: Any, starts: Callable[[Any], bool]) -> tuple[Any, Rotation] | None:
    """Return (x, the rotation) for the rotated Q or K, (B, heads, tokens, head_dim); None if it has another form.

    starts: whether a value is x, the end of the split into heads.
    """
    leaves: dict[Key, Any] = {}
    if not _collect(value, starts, leaves, set()) or len(leaves) != 1:
        return None
    (leaf,) = leaves.values()
    normed = leaf.get_node().get_type_name() == "MVN"
    x = inputs_of(leaf)[0] if normed else leaf
    shape = shape_of(x)
    if not starts(x) or shape is None or len(shape) != 3 or shape[-1] % 2 or shape_of(value) != shape:
        return None
    epsilon = None
    if normed:
        norm, attributes = leaf.get_node(), leaf.get_node().get_attributes()
        if not (over_last_axis(norm) and attributes["normalize_variance"] and attributes["eps_mode"] == "INSIDE_SQRT"):
            return None
        epsilon = float(attributes["eps"])
    try:
        for halves in (False, True):
            tables = _tables(lambda probe: _evaluated(value, {key_of(leaf): probe}), shape, halves)
            if tables is not None:
                return x, Rotation(tables, halves, epsilon)
    except (IndexError, ValueError):  # an operator that states the number of images cannot take the probes
        pass
    return None


def _tables(compute: Callable[[Any], Any], shape: tuple[int, ...], halves: bool) -> Any:
    """Return C, S and maybe D of a linear function of (B, heads, tokens, head_dim), or None if it has another form."""
    columns = np.arange(shape[-1])
    partner = (columns + shape[-1] // 2) % shape[-1] if halves else columns ^ 1
    first = columns < partner
    shift = compute(np.zeros((1, *shape)))[0]
    ones = (np.broadcast_to(which.astype(float), (1, *shape)) for which in (first, ~first))
    of_first, of_others = (compute(each)[0] - shift for each in ones)
    cosine, sine = np.where(first, of_first, of_others), np.where(first, of_others, of_first)
    probe = np.random.default_rng(0).standard_normal((2, *shape))  # of two images, which no operator may mix
    if not np.allclose(compute(probe), probe * cosine + probe[..., partner] * sine + shift, rtol=1e-9, atol=1e-9):
        return None
    tables = np.stack([cosine, sine, shift] if shift.any() else [cosine, sine]).astype(np.float32)
    return tables[:, :1] if (tables == tables[:, :1]).all() else tables


# ---- linear operators ----------------------------------------------------------------------------------------------


def _collect(value: Any, starts: Callable[[Any], bool], leaves: dict[Key, Any], seen: set[Key]) -> bool:
    """Add the values from which linear operators compute ``value``.  False: two computed values are multiplied."""
    if constant(value) is not None or key_of(value) in seen:
        return True
    seen.add(key_of(value))
    if starts(value) or value.get_node().get_type_name() not in _LINEAR:
        leaves[key_of(value)] = value
        return True
    if kind_of(value) == "multiplication" and all(constant(operand) is None for operand in inputs_of(value)):
        return False
    return all(_collect(operand, starts, leaves, seen) for operand in inputs_of(value))


def _evaluated(value: Any, known: dict[Key, Any]) -> Any:
    """Compute ``value`` in float64.  known: values that are given or computed already."""
    if key_of(value) not in known:
        stored = constant(value)
        if stored is not None:
            known[key_of(value)] = stored.astype(np.float64) if stored.dtype.kind == "f" else stored
        else:
            node = value.get_node()
            result = _LINEAR[node.get_type_name()](node, *(_evaluated(operand, known) for operand in inputs_of(value)))
            known[key_of(value)] = result[value.get_index()] if isinstance(result, list) else result
    return known[key_of(value)]


def _slice(node: Any, x: Any, start: Any, stop: Any, step: Any, axes: Any = None) -> Any:
    cuts = [slice(None)] * x.ndim
    for index, axis in enumerate(range(len(start)) if axes is None else axes):
        cuts[int(axis)] = slice(int(start[index]), int(stop[index]), int(step[index]))
    return x[tuple(cuts)]


def _reshape(node: Any, x: Any, shape: Any) -> Any:
    copies = node.get_attributes()["special_zero"]
    return x.reshape([x.shape[axis] if copies and size == 0 else int(size) for axis, size in enumerate(shape)])


_LINEAR: dict[str, Callable[..., Any]] = {
    "Add": lambda _, x, y: x + y,
    "Concat": lambda node, *parts: np.concatenate(parts, node.get_attributes()["axis"]),
    "Gather": lambda _, x, indices, axis: np.take(x, indices, int(axis)),
    "Multiply": lambda _, x, y: x * y,
    "Negative": lambda _, x: -x,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": lambda node, x, axis: np.split(x, len(node.outputs()), int(axis)),
    "Squeeze": lambda _, x, axes: np.squeeze(x, tuple(int(axis) for axis in np.atleast_1d(axes))),
    "Subtract": lambda _, x, y: x - y,
    "Transpose": lambda node, x, _: x.transpose(order_of(node.output(0))),
    "Unsqueeze": lambda _, x, axes: np.expand_dims(x, tuple(int(axis) for axis in np.atleast_1d(axes))),
    "VariadicSplit": lambda _, x, axis, sizes: np.split(x, np.cumsum(sizes)[:-1], int(axis)),
}
