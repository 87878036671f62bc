"""Our own kernels inside OpenVINO.  Imports nothing of ours but its neighbours: a server's model brings them along.

    Split, Reshape, Transpose, MatMul, Multiply by M, Add, Softmax, MatMul, Transpose, Reshape  →  one operation

which `masked_attention.c` computes in one pass over the cache; and in a graph that is quantised

    Add, LayerNorm, QuantizeLinear  →  one operation

by `residual_norm.c`. Which attentions are replaced `matcher.py` says, with the reason for each that is not; whatever
else a graph has stays OpenVINO's own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

# By their place beside this file, which is the same in a server's model.
from .matcher import MatchedAttention, attentions_in, summary_of
from .openvino_view import OpenVinoView, constant, constant_and_other, down, nodes_of, static, takers, up
from .prepared_masks import LANES, LOG2_E, Arithmetic, prepared_bias, prepared_mask

__all__ = ["Arithmetic", "Form", "Kernels", "kernels_from"]

_ARITHMETIC: dict[Arithmetic, int] = {"f32": 1, "bf16": 2}  # as masked_attention.h numbers them
_FALLBACK: dict[Arithmetic, tuple[Arithmetic, ...]] = {"f32": (), "bf16": ("f32",)}


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
        """Replace the attentions of an OpenVINO model, with the quantising of what they give; return how many."""
        matches = attentions_in(OpenVinoView(model))
        found = [_form_of(match, self.arithmetic) for match in matches if isinstance(match, MatchedAttention)]
        grids = [_quantised(form.last) for form in found]
        if not _quantises_beside(model, sum(len(nodes) for _, nodes in grids)):
            grids = [(None, ()) for _ in found]
        for form, (step, quantised) in zip(found, grids, strict=True):
            attributes = {**form.attributes, "steps": 1 / step if step else 0.0}
            self._put("MaskedAttention", replace(form, attributes=attributes, quantised=quantised))
        model.validate_nodes_and_infer_types()
        return len(found)

    def describe_attention(self, model: Any) -> str:
        """How many attentions of a model `fuse_attention` would replace, and why not the others: `summary_of`."""
        return summary_of(attentions_in(OpenVinoView(model)))

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
    The arithmetic is the requested one, or float32 where the processor has no bf16.
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


# ---- one operation from one attention ----------------------------------------------------------------------------


def _form_of(attention: MatchedAttention, arithmetic: Arithmetic) -> Form:
    """float32 if the mask does not fit the arithmetic."""
    inputs, parts = _sources([(part.source, part.column) for part in attention.parts])
    masks, biases, grid, scale = [], [], 0, 1.0
    if attention.mask is None:
        scale = attention.scale * LOG2_E
    else:
        mask = prepared_mask(attention.mask, arithmetic)
        masks, grid, arithmetic = [mask.numbers], mask.grid, mask.arithmetic
    if attention.bias is not None:
        biases = [prepared_bias(attention.bias, attention.heads, attention.tokens, attention.windows)]
    attributes = {
        "heads": attention.heads,
        "n": attention.tokens,
        "d": attention.head_dim,
        "grid": grid,
        "parts": [number for part in parts for number in part],
        "masked": bool(masks),
        "biased": bool(biases),
        "mixed": bool(attention.mixing),
        "scale": scale,
        "arithmetic": _ARITHMETIC[arithmetic],
    }
    return Form(attributes, inputs, [*masks, *biases, *attention.mixing], attention.last.get_node())


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
    """Return both addends of a sum if neither is constant nor broadcast, else an empty tuple."""
    node = value.get_node()
    if node.get_type_name() != "Add":
        return ()
    both = (node.input_value(0), node.input_value(1))
    return both if all(constant(one) is None and static(one) == static(value) for one in both) else ()
