"""Replace attentions, norms and int8 products of an OpenVINO model by operations that this project's kernels compute.

    Split, Reshape, Transpose, MatMul, Multiply by the mask, Add, Softmax, MatMul, Transpose, Reshape
        →  MaskedAttention, which `attention_on_vectors.h` computes in a single pass over the data in the cache

    Add, LayerNorm, QuantizeLinear, in a quantised graph
        →  ResidualNorm, which `norm_on_vectors.h` computes

    MatMul of int8 values, GELU, QuantizeLinear, Add, LayerNorm, again and again
        →  ProductChain, which `chain_on_vectors.h` computes: see `product_chains.py`

Swin divides the tokens into windows between LayerNorm and QuantizeLinear.  ResidualNorm then stands before this
division, which moves int8 values instead of float32 values.

`matcher.py` decides which attentions are replaced, and gives the reason for every other attention. OpenVINO computes
all other nodes with its built-in operators.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .matcher import MatchedAttention, attentions_in, summary_of
from .openvino_view import (
    bounds_of,
    constant,
    constant_and_other,
    key_of,
    nodes_of,
    over_last_axis,
    reader_of,
    shape_of,
    takers,
    takers_behind_layout,
)
from .precision import Arithmetic
from .prepared_masks import LANES, LOG2_E, prepared_bias, prepared_mask
from .product_chains import Chain, chains_in, share_in_chains
from .rotation import Rotation

_ARITHMETIC: dict[Arithmetic, int] = {"f32": 1, "bf16": 2}  # the numbers of masked_attention.h
_TOKENS_A_CORE = 8  # the rows that chain_on_vectors.h multiplies at once
_MIN_SHARE = 0.9


@dataclass(frozen=True, eq=False)
class Quantised:
    """An int8 value.  source: the float32 value that is quantised, maybe moved after the replaced node computed it."""

    node: Any
    source: Any


@dataclass(frozen=True, eq=False)
class Form:
    """A part of a graph, and the arguments of the operation of ours that replaces this part.

    last: the node whose output the operation computes.
    quantised: the int8 values that it computes instead; empty if a node reads the output in another type.
    sum: the value of the sum of the inputs, if the operation returns it as a second output.
    rounded: the operation reads ``inputs`` and writes its output in bfloat16.
    """

    attributes: dict[str, Any]
    inputs: list[Any]
    constants: list[Any]
    last: Any
    quantised: tuple[Quantised, ...] = ()
    sum: Any = None
    rounded: bool = False


@dataclass(frozen=True, eq=False)
class Kernels:
    """The operations of this project, loaded into OpenVINO.

    arithmetic: of attention.  instruction_set: such as ``avx2``.
    multiplies_int8: whether the operations compute int8 products on this processor.
    """

    arithmetic: Arithmetic
    instruction_set: str
    multiplies_int8: bool
    _factory: Any

    def fuse_attention(self, model: Any, *, hint: Arithmetic = "f32") -> tuple[int, str]:
        """Replace the attentions of an OpenVINO model, and the quantisation of their outputs.

        Returns (the number that was replaced, the summary of all attentions: see `summary_of`).
        hint: the type in which OpenVINO will compute all other operators. With bf16, an attention that is computed in
        bf16 also reads and writes bf16, so that OpenVINO converts nothing before and after it.
        """
        matches = attentions_in(model)
        summary = summary_of(matches)
        forms = [_form_of(match, self.arithmetic, hint) for match in matches if isinstance(match, MatchedAttention)]
        grids = [_quantised(form.last, through_layout=False) for form in forms]
        if not _quantises_beside(model, sum(len(nodes) for _, nodes in grids)):
            grids = [(None, ()) for _ in forms]
        stored: dict[bytes, Any] = {}
        for form, (step, quantised) in zip(forms, grids, strict=True):
            attributes = {**form.attributes, "steps": 1 / step if step else 0.0}
            self._put("MaskedAttention", replace(form, attributes=attributes, quantised=quantised), stored)
        model.validate_nodes_and_infer_types()
        return len(forms), summary

    def fuse_norms(self, model: Any) -> int:
        """Replace the LayerNorms of an OpenVINO model whose outputs are all quantised; return their number.

        This is faster only for many rows: OpenVINO needs some microseconds to call an operation of ours.
        """
        nodes = nodes_of(model, "MVN")
        if not _quantises_beside(model, sum(len(form.quantised) for node in nodes if (form := _matched_norm(node)))):
            return 0
        replaced = 0
        for node in nodes:
            form = _matched_norm(node)  # matched again: the previous replacement may have changed this norm's input
            if form is not None:
                self._put("ResidualNorm", form, {})
                replaced += 1
        model.validate_nodes_and_infer_types()
        return replaced

    def fuse_products(self, model: Any, *, cores: int = 1) -> int:
        """Replace the int8 products of an OpenVINO model, and the steps between them, after `fuse_norms`.

        Nothing is replaced if an image has too few tokens for ``cores`` cores, because each core reads all weights, or
        if many products would be left: `OpenVinoProgram` computes these in float32.
        Returns the number of replaced products.
        """
        chains = chains_in(model) if self.multiplies_int8 else []
        if max((chain.tokens for chain in chains), default=0) < _TOKENS_A_CORE * cores:
            return 0
        if share_in_chains(model, chains) < _MIN_SHARE:
            return 0
        computed: dict[tuple[str, int], Any] = {}
        for chain in chains:
            self._put_chain(chain, computed)
        model.validate_nodes_and_infer_types()
        return sum(len(chain.products) for chain in chains)

    def _put_chain(self, chain: Chain, computed: dict[tuple[str, int], Any]) -> None:
        """computed: a replaced value's node and index → the value of an earlier chain."""
        from openvino import opset13

        inputs = [computed.get(key_of(value), value) for value in chain.inputs]
        constants = [opset13.constant(values) for values in chain.constants]
        fused = self._factory.create("ProductChain", [*inputs, *constants], chain.attributes)
        fused.set_friendly_name(f"{chain.products[0].get_friendly_name()}/ProductChain")
        for number, value in enumerate(chain.values):
            computed[key_of(value)] = fused.output(number)
            value.replace(fused.output(number))

    def _put(self, operation: str, form: Form, stored: dict[bytes, Any]) -> None:
        """stored: hash → constant of an earlier form; layers with equal masks or rotations share a constant."""
        from openvino import opset13

        constants = []
        for values in form.constants:
            key = hashlib.sha256(f"{values.dtype} {values.shape}".encode() + values.tobytes()).digest()
            if key not in stored:
                stored[key] = opset13.constant(values)
            constants.append(stored[key])
        inputs = [opset13.convert(value, "bf16").output(0) for value in form.inputs] if form.rounded else form.inputs
        fused = self._factory.create(operation, [*inputs, *constants], form.attributes)
        fused.set_friendly_name(form.last.get_friendly_name())
        output = fused.output(0)
        replaced = form.last.output(0)
        if form.rounded and not form.quantised:
            output = opset13.convert(fused, replaced.get_element_type().get_type_name()).output(0)
        for value in form.quantised:
            value.node.output(0).replace(output if value.source == replaced else value.source)
        replaced.replace(output)
        if form.sum is not None:
            form.sum.replace(fused.output(1))


def kernels_from(library: Path, requested: Arithmetic) -> tuple[Kernels | None, str]:
    """Load this project's kernels.

    library: the compiled openvino_operations.cpp, for the installed version of OpenVINO.
    requested: the type in which attention is computed. On a processor without bf16, float32 replaces bf16.
    Returns (the kernels, the type in which attention is computed) or (None, why the kernels cannot be loaded).
    """
    from openvino.utils.node_factory import NodeFactory

    try:
        kernels = ctypes.CDLL(str(library))
        for stated in (kernels.gmmvit_instruction_set_name, kernels.gmmvit_why_no_instruction_set):
            stated.restype = ctypes.c_char_p
        support = int(kernels.masked_attention_support())
        multiplies_int8 = bool(kernels.product_chain_support())
        factory = NodeFactory()
        factory.add_extension(str(library))
    # OpenVINO raises RuntimeError for a library that was compiled for another version of OpenVINO.
    except (OSError, RuntimeError) as exc:
        return None, f"{library.name} cannot be loaded: {exc}"
    if not support:
        return None, kernels.gmmvit_why_no_instruction_set().decode()
    arithmetic: Arithmetic = requested if support >= _ARITHMETIC[requested] else "f32"
    return Kernels(arithmetic, kernels.gmmvit_instruction_set_name().decode(), multiplies_int8, factory), arithmetic


# ---- make an operation from an attention -------------------------------------------------------------------------


def _form_of(attention: MatchedAttention, arithmetic: Arithmetic, hint: Arithmetic) -> Form:
    """Return the form of an attention.  Attention is computed in float32 if the mask does not fit ``arithmetic``."""
    inputs, parts = _sources([(part.source, part.column) for part in attention.parts])
    masks, biases, grid, scale = [], [], 0, 1.0
    mixings = [matrix for matrix in attention.mixing if matrix is not None]
    tables, rotations = _tables_of(attention.rotations, len(inputs))
    if attention.mask is None:
        scale = attention.scale * LOG2_E
    else:
        mask = prepared_mask(attention.mask, arithmetic)
        masks, grid, arithmetic = [mask.numbers], mask.grid, mask.arithmetic
    if attention.bias is not None:
        biases = [prepared_bias(attention.bias, attention.heads, (attention.queries, attention.tokens))]
    attributes = {
        "heads": attention.heads,
        "queries": attention.queries,
        "n": attention.tokens,
        "d": attention.head_dim,
        "grid": grid,
        "parts": [number for part in parts for number in part],
        "masked": bool(masks),
        "biased": bool(biases),
        "mixings": len(mixings),
        "rotations": rotations,
        "epsilons": [rotation.epsilon or 0.0 if rotation else 0.0 for rotation in attention.rotations],
        "scale": scale,
        "arithmetic": _ARITHMETIC[arithmetic],
    }
    rounded = hint == arithmetic == "bf16"
    return Form(attributes, inputs, [*tables, *masks, *biases, *mixings], attention.last.get_node(), rounded=rounded)


def _tables_of(rotations: tuple[Rotation | None, ...], first: int) -> tuple[list[Any], list[int]]:
    """Return (the tables, for Q and K each: the input with the tables or −1, whether halves, whether normed).

    first: the index of the first of the tables among the operation's inputs.
    """
    tables: list[Any] = []
    numbers: list[int] = []
    for rotation in rotations:
        if rotation is None:
            numbers += [-1, 0, 0]
            continue
        numbers += [first + len(tables), int(rotation.halves), int(rotation.epsilon is not None)]
        tables.append(rotation.tables)
    return tables, numbers


def _sources(ends: list[tuple[Any, int]]) -> tuple[list[Any], tuple[tuple[int, int], ...]]:
    """Return (the distinct values of (value, column) pairs, the pairs with the value's index instead of the value)."""
    inputs = {key_of(value): value for value, _ in ends}
    return list(inputs.values()), tuple((list(inputs).index(key_of(value)), column) for value, column in ends)


# ---- find norms and quantised values ------------------------------------------------------------------------------


def _matched_norm(mvn: Any) -> Form | None:
    """Match Quantize(move(norm(x))) or Quantize(move(norm(x + branch))), with a norm that nothing else reads."""
    attributes = mvn.get_attributes()
    scaled = reader_of(mvn.output(0))
    weight = constant_and_other(scaled, "multiplication") if scaled is not None else None
    shifted = reader_of(scaled) if weight is not None else None
    bias = constant_and_other(shifted, "addition") if shifted is not None else None
    if shifted is None or weight is None or bias is None:
        return None
    if attributes.get("eps_mode") != "INSIDE_SQRT" or not over_last_axis(mvn):
        return None
    last = shifted.get_node()
    step, quantised = _quantised(last, through_layout=True)
    x = mvn.input_value(0)
    shape = shape_of(x)
    if step is None or shape is None or len(shape) != 2 or shape[1] % LANES:
        return None
    constants = [np.asarray(vector[0], np.float32).reshape(-1) / np.float32(step) for vector in (weight, bias)]
    if any(vector.size != shape[1] for vector in constants):
        return None
    summands = _summands(x)
    attributes = {"adds": bool(summands), "epsilon": float(attributes["eps"])}
    return Form(attributes, [*(summands or (x,))], constants, last, quantised, x if summands else None)


def _quantised(node: Any, *, through_layout: bool) -> tuple[float | None, tuple[Quantised, ...]]:
    """Return (step of the grid, int8 values) if all readers of a node quantise it on the same grid, else (None, ()).

    through_layout: whether other nodes may move the values before they are quantised.
    """
    steps: set[float] = set()
    values: list[Quantised] = []
    for reader in takers_behind_layout(node) if through_layout else takers(node):
        bounds = bounds_of(reader)
        if bounds is None:
            return None, ()
        low, high, *ends = bounds
        if ends != [-128, 127] or not np.isclose(low * 127, high * -128):
            return None, ()
        steps.add(high / 127)
        source = reader.input_value(0)
        values += [Quantised(target.get_node(), source) for target in reader.output(0).get_target_inputs()]
    whole = all(value.node.get_output_element_type(0).get_type_name() == "i8" for value in values)
    return (steps.pop(), tuple(values)) if len(steps) == 1 and whole else (None, ())


def _quantises_beside(model: Any, taken: int) -> bool:
    """Return whether a FakeQuantize stays in the graph if our operations replace ``taken`` FakeQuantize nodes."""
    # OpenVINO computes matrix products in int8 only in graphs that contain a FakeQuantize.
    return len(nodes_of(model, "FakeQuantize")) > taken


def _summands(value: Any) -> tuple[Any, ...]:
    """Return both inputs of an addition if neither is constant or broadcast, otherwise an empty tuple."""
    node = value.get_node()
    if node.get_type_name() != "Add":
        return ()
    both = (node.input_value(0), node.input_value(1))
    return both if all(constant(addend) is None and shape_of(addend) == shape_of(value) for addend in both) else ()
