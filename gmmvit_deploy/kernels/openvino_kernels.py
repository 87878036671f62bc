"""Our own kernels inside OpenVINO.  Imports nothing of ours but its neighbours: a server's model brings them along.

    Split, Reshape, Transpose, MatMul, Multiply by M, Add, Softmax, MatMul, Transpose, Reshape  →  one operation

which `masked_attention.c` computes in one pass over the cache; and in a graph that is quantised

    Add, LayerNorm, QuantizeLinear  →  one operation

by `residual_norm.c`. Only what is exactly this is replaced (with a bias or not; within windows, as in Swin, or not; or
with heads mixed before and after softmax, as in CaiT); whatever else a graph has stays OpenVINO's own: attention from
one token to many, heads whose width is no multiple of 16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

# By their place beside this file, which is the same in a server's model.
from .openvino_graph import constant, constant_and_other, down, nodes_of, permutes, static, takers, up
from .prepared_masks import LANES, LOG2_E, Arithmetic, prepared_bias, prepared_mask

__all__ = ["Arithmetic", "Form", "Kernels", "kernels_from"]

_ARITHMETIC: dict[Arithmetic, int] = {"f32": 1, "bf16": 2}  # as masked_attention.h numbers them
_FALLBACK: dict[Arithmetic, tuple[Arithmetic, ...]] = {"f32": (), "bf16": ("f32",)}
_MOST_MIXED = 16
# With a dimension for windows, or without:
_HEADS_APART = [0, 2, 1, 3], [0, 1, 3, 2, 4]  # (B, n, H, d) → (B, H, n, d), and back
_KEYS_ACROSS = [0, 2, 3, 1], [0, 1, 3, 4, 2]  # (B, n, H, d) → (B, H, d, n)


@dataclass(frozen=True, eq=False)
class Form:
    """A part of a graph that one operation of ours computes.

    attributes, inputs, constants: the operation's.  last: the node whose value it gives; quantised: those that have
    it in int8, where nothing else of it is read.  sum: of the inputs, given besides.
    """

    attributes: dict[str, Any]
    inputs: list[Any]
    constants: list[Any]
    last: Any
    quantised: tuple[Any, ...] = ()
    sum: Any = None


@dataclass(frozen=True, eq=False)
class Kernels:
    """Our operations, loaded.  arithmetic: that attention is computed in."""

    arithmetic: Arithmetic
    _factory: Any

    def fuse_attention(self, model: Any) -> int:
        """How many attentions of an OpenVINO model were replaced, with the quantising of what they give."""
        found = [one for node in nodes_of(model, "Softmax") if (one := _matched(node, self.arithmetic))]
        grids = [_quantised(form.last) for form in found]
        if not _quantises_beside(model, sum(len(nodes) for _, nodes in grids)):
            grids = [(None, ()) for _ in found]
        for form, (step, quantised) in zip(found, grids, strict=True):
            attributes = {**form.attributes, "steps": 1 / step if step else 0.0}
            self._put("MaskedAttention", replace(form, attributes=attributes, quantised=quantised))
        model.validate_nodes_and_infer_types()
        return len(found)

    def fuse_norms(self, model: Any) -> int:
        """How many LayerNorms of an OpenVINO model, all of whose values are quantised, were replaced.

        Worth it where rows are many: each operation of ours costs OpenVINO some microseconds to call.
        """
        nodes = nodes_of(model, "MVN")
        if not _quantises_beside(model, sum(len(form.quantised) for one in nodes if (form := _matched_norm(one)))):
            return 0
        replaced = 0
        for node in nodes:
            form = _matched_norm(node)  # only now: what goes in may be what the one before gives
            if form is not None:
                self._put("ResidualNorm", form)
                replaced += 1
        model.validate_nodes_and_infer_types()
        return replaced

    def _put(self, operation: str, form: Form) -> None:
        from openvino import opset13

        constants = [opset13.constant(one) for one in form.constants]
        fused = self._factory.create(operation, [*form.inputs, *constants], form.attributes)
        fused.set_friendly_name(form.last.get_friendly_name())
        for replaced in form.quantised or (form.last,):
            replaced.output(0).replace(fused.output(0))
        if form.sum is not None:
            form.sum.replace(fused.output(1))


def kernels_from(library: Path, wanted: Arithmetic) -> tuple[Kernels | None, str]:
    """(our kernels, the arithmetic that attention is computed in); or (None, why there are none).

    library: openvino_operations.cpp, compiled for the OpenVINO that is here.
    The arithmetic is the one that is wanted, or float32 where the processor has no bf16.
    """
    from openvino.utils.node_factory import NodeFactory

    try:
        support = int(ctypes.CDLL(str(library)).masked_attention_support())
        factory = NodeFactory()
        factory.add_extension(str(library))
    # OpenVINO raises RuntimeError for a library that was compiled for another version of it.
    except (OSError, RuntimeError) as exc:
        return None, f"{library.name} cannot be loaded: {exc}"
    for arithmetic in (wanted, *_FALLBACK[wanted]):
        if support >= _ARITHMETIC[arithmetic]:
            return Kernels(arithmetic, factory), arithmetic
    return None, "this processor has no AVX-512"


# ---- finding attention in a graph --------------------------------------------------------------------------------


def _matched(softmax: Any, arithmetic: Arithmetic) -> Form | None:
    """Its form when all around this Softmax is masked attention; float32 if the mask does not fit the arithmetic."""
    above = _scores(softmax)
    below = _output(softmax)
    if above is None or below is None:
        return None
    query, key, factor, bias, before = above
    value, last, after = below
    ends = [_part(query, _HEADS_APART), _part(key, _KEYS_ACROSS), _part(value, _HEADS_APART)]
    if any(one is None for one in ends) or (before is None) != (after is None):
        return None
    *outer, heads, n, width = static(query)
    inputs, parts = _sources([one for one in ends if one is not None])
    same = static(key) == [*outer, heads, width, n] and static(value) == [*outer, heads, n, width]
    fits = same and width % LANES == 0 and (before is None or len(before) == heads <= _MOST_MIXED)
    if not fits or any(static(one)[:-1] != [*outer, n] for one in inputs):
        return None
    if static(last.output(0)) != [*outer, n, heads * width]:
        return None
    masks, grid, scale, biases = [], 0, 1.0, []
    if bias is not None:
        biases = [prepared_bias(bias, heads, n, tuple(outer[1:]))]
        if before is not None or biases[0] is None:
            return None
    if factor.size == 1:
        scale = float(factor.reshape(())) * LOG2_E
    elif factor.shape[-3:] == (heads, n, n) and factor.size == heads * n * n:
        mask = prepared_mask(factor.reshape(heads, n, n), arithmetic)
        masks, grid, arithmetic = [mask.numbers], mask.grid, mask.arithmetic
    else:
        return None
    mixing = [] if before is None else [before, after]
    attributes = {
        "heads": heads,
        "n": n,
        "d": width,
        "grid": grid,
        "parts": [number for part in parts for number in part],
        "masked": bool(masks),
        "biased": bool(biases),
        "mixed": bool(mixing),
        "scale": scale,
        "arithmetic": _ARITHMETIC[arithmetic],
    }
    return Form(attributes, inputs, [*masks, *biases, *mixing], last)


def _scores(softmax: Any) -> tuple[Any, Any, Any, Any, Any] | None:
    """(Q, Kᵀ, M or the scale, the bias or None, the mixing or None) of what goes into this Softmax over keys."""
    at = up(softmax.input_value(0), "Convert")
    if softmax.get_attributes().get("axis") not in (-1, len(static(at)) - 1):
        return None
    mixed = _unmixed(at)
    before, at = mixed if mixed else (None, at)
    bias, at = constant_and_other(at.get_node(), "Add") or (None, at)
    factor, at = constant_and_other(up(at, "Convert").get_node(), "Multiply") or (np.float32(1), at)
    product = _factors(up(at, "Convert").get_node())
    if product is None:
        return None
    query, key = product
    scale, unscaled = constant_and_other(query.get_node(), "Multiply") or (np.float32(1), query)
    if scale.size == 1:  # of Q alone, before the product
        factor, query = np.asarray(factor, np.float32) * scale.reshape(()), up(unscaled, "Convert")
    return query, key, np.asarray(factor, np.float32), bias, before


def _output(softmax: Any) -> tuple[Any, Any, Any] | None:
    """(V, the node that puts heads side by side again, the mixing or None)."""
    at, after = down(softmax, "Convert"), None
    if at is not None and at.get_type_name() == "Reshape":
        mixing = down(at, "Convert")
        back = mixing and down(mixing)
        mixed = _unmixed(back.output(0)) if back else None
        if mixed is None or back is None:
            return None
        after, at = mixed[0], down(back, "Convert")
    product = _factors(at) if at is not None else None
    if at is None or product is None:
        return None
    transpose = down(at)
    last = down(transpose) if transpose is not None and permutes(transpose, *_HEADS_APART) else None
    if last is None or last.get_type_name() != "Reshape":
        return None
    return product[1], last, after


def _unmixed(value: Any) -> tuple[Any, Any] | None:
    """Reshape(W @ Reshape(x))  →  (Wᵀ, x): heads mixed by one product."""
    outer = value.get_node()
    if outer.get_type_name() != "Reshape":
        return None
    split = constant_and_other(outer.input_value(0).get_node(), "MatMul")
    if split is None:
        return None
    weights, flat = split
    inner = up(flat, "Convert").get_node()
    if inner.get_type_name() != "Reshape" or weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        return None
    product = outer.input_value(0).get_node()
    if constant(product.input_value(0)) is None or not _is_plain_product(product):
        return None
    inside = inner.input_value(0)
    if static(inside) != static(value) or static(flat)[1:2] != static(inside)[1:2]:
        return None
    return np.ascontiguousarray(weights.T, np.float32), inside


def _factors(node: Any) -> tuple[Any, Any] | None:
    if not _is_plain_product(node):
        return None
    both = up(node.input_value(0), "Convert"), up(node.input_value(1), "Convert")
    return both if [len(static(one)) for one in both] in ([4, 4], [5, 5]) else None


def _is_plain_product(node: Any) -> bool:
    """A product that transposes nothing on its way."""
    attributes = node.get_attributes()
    return node.get_type_name() == "MatMul" and not (attributes.get("transpose_a") or attributes.get("transpose_b"))


def _part(value: Any, orders: tuple[list[int], ...]) -> tuple[Any, int] | None:
    """Transpose(Reshape(x)) → (x, 0); of one part of a Split along the columns → (what was split, its first column)."""
    transpose = value.get_node()
    if not permutes(transpose, *orders):
        return None
    reshape = transpose.input_value(0).get_node()
    if reshape.get_type_name() != "Reshape":
        return None
    whole = reshape.input_value(0)
    shape, apart = static(whole), static(transpose.input_value(0))
    if apart[:-2] != shape[:-1] or apart[-2] * apart[-1] != shape[-1]:
        return None
    node = whole.get_node()
    axis = constant(node.input_value(1)) if node.get_type_name() == "Split" else None
    if axis is not None and int(axis.reshape(())) in (-1, len(shape) - 1):
        return node.input_value(0), whole.get_index() * shape[-1]
    return whole, 0


def _sources(ends: list[tuple[Any, int]]) -> tuple[list[Any], tuple[tuple[int, int], ...]]:
    """(the distinct values, for each end which of them and at which column)."""
    inputs: list[Any] = []
    keys: list[tuple[str, int]] = []
    parts = []
    for value, column in ends:
        key = (value.get_node().get_name(), value.get_index())
        if key not in keys:
            keys.append(key)
            inputs.append(value)
        parts.append((keys.index(key), column))
    return inputs, tuple(parts)


# ---- finding norms, and what is quantised -------------------------------------------------------------------------


def _matched_norm(mvn: Any) -> Form | None:
    """Its form when Quantize(norm(x)), or of x + branch, is all that this normalisation is for."""
    attributes = mvn.get_attributes()
    scaled = down(mvn, "Convert")
    weight = constant_and_other(scaled, "Multiply") if scaled is not None else None
    shifted = down(scaled, "Convert") if weight is not None else None
    bias = constant_and_other(shifted, "Add") if shifted is not None else None
    if weight is None or bias is None or attributes.get("eps_mode") != "INSIDE_SQRT" or not _over_last_axis(mvn):
        return None
    step, quantised = _quantised(shifted)
    x = up(mvn.input_value(0), "Convert")
    width = static(x)[-1:]
    if step is None or len(static(x)) != 3 or width[0] % LANES:
        return None
    constants = [np.asarray(one[0], np.float32).reshape(-1) / np.float32(step) for one in (weight, bias)]
    if any(one.size != width[0] for one in constants):
        return None
    summands = _summands(x)
    attributes = {"adds": bool(summands), "epsilon": float(attributes["eps"])}
    return Form(attributes, [*(summands or (x,))], constants, shifted, quantised, x if summands else None)


def _quantised(value: Any) -> tuple[float | None, tuple[Any, ...]]:
    """(the step, the int8 nodes) of what takes this value, when all of it is int8 on one and the same grid."""
    steps: set[float] = set()
    found = []
    for node in takers(value):
        bounds = [constant(node.input_value(index)) for index in range(1, len(node.inputs()))]
        if node.get_type_name() != "FakeQuantize" or any(one is None or one.size != 1 for one in bounds):
            return None, ()
        low, high, least, most = (float(one.reshape(())) for one in bounds)
        if (least, most, node.get_attributes()["levels"]) != (-128, 127, 256) or not np.isclose(low * 127, high * -128):
            return None, ()
        steps.add(high / 127)
        found += [target.get_node() for target in node.output(0).get_target_inputs()]
    whole = all(one.get_output_element_type(0).get_type_name() == "i8" for one in found)
    return (steps.pop(), tuple(found)) if len(steps) == 1 and whole else (None, ())


def _quantises_beside(model: Any, taken: int) -> bool:
    """OpenVINO multiplies in int8 only in a graph that quantises something itself: is any left?"""
    return len(nodes_of(model, "FakeQuantize")) > taken


def _over_last_axis(mvn: Any) -> bool:
    """Its axes, which an importer may leave as arithmetic on constants."""
    axes = mvn.input_value(1).get_node()
    values = constant(mvn.input_value(1))
    if values is None and axes.get_type_name() == "Range":
        ends = [constant(axes.input_value(index)) for index in range(3)]
        values = None if any(one is None for one in ends) else np.arange(*(int(one.reshape(())) for one in ends))
    return values is not None and values.reshape(-1).tolist() in ([-1], [2])


def _summands(value: Any) -> tuple[Any, ...]:
    """Of a sum of two values, neither a constant nor broadcast; empty if it is none."""
    node = value.get_node()
    if node.get_type_name() != "Add":
        return ()
    both = (node.input_value(0), node.input_value(1))
    return both if all(constant(one) is None and static(one) == static(value) for one in both) else ()
