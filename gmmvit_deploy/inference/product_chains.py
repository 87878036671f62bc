"""Find the int8 products, LayerNorms and residual sums that a single operation of ours computes row by row.

    int8 attention → product → + x → norm → product → GELU, quantised → product → + x → norm → product → Q, K, V

In place of GELU, also its tanh form 2 y σ(…), quick GELU and SiLU: y · σ(slope · y + cubic · y³), and each of these
times another product of the same values: SwiGLU and GEGLU.

A row, which is a token, needs no other row in these steps, so `chain_on_vectors.h` computes them on the rows of a core
one after the other.  A chain ends before a node that is not one of these steps, and where values inside the chain have
another reader.

`chains_in` reads a model whose norms are `ResidualNorm` operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .openvino_view import bounds_of, constant, constant_and_other, reader_of, shape_of
from .prepared_masks import LANES

_NORM, _OUT, _ADD, _GELU, _QUANTISE, _SIGMOID, _HOLD = range(7)  # the numbers of product_chain.h
_PANEL = 3 * LANES  # columns, as in chain_on_vectors.h
_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)  # x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) = x σ(2 √(2/π) (x + 0.044715 x³))
_TANH_CUBIC = 0.044715 * _TANH_SLOPE
_INT8 = {"i8": 128, "u8": 0}  # OpenVINO's type → what is added to a value to be a number of 0 to 255


@dataclass(frozen=True, eq=False)
class Product:
    """An int8 product with its bias.

    node: the MatMul.  source: the int8 value that it multiplies.
    weights: int8 (depth, columns).  start: int32 (columns), at which the sums of weights times numbers of 0 to 255
    start.  scale, bias: float32 (columns), with which the sums become the output.
    output: the value after the bias.
    """

    node: Any
    source: Any
    weights: np.ndarray
    start: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    output: Any


class Step(NamedTuple):
    """A step of a chain, as in product_chain.h.  steps, zero: of the grid.  slope, cubic: of `_SIGMOID`."""

    kind: int
    depth: int = 0
    columns: int = 0
    epsilon: float = 0.0
    steps: float = 0.0
    zero: float = 0.0
    slope: float = 0.0
    cubic: float = 0.0


@dataclass(eq=False)
class Chain:
    """A chain, and the values that it computes.

    inputs: the values that the operation reads before its constants.  constants: those of each step, in order.
    x: the value of the residual stream after the steps so far; None if no step has read it.
    sum, normed, stored: the values of the graph that the operation returns: x if a step changes it, the int8 values of
    a norm that is last, and the products that are stored.
    products: the MatMul nodes that the operation replaces.
    taken: the names of the nodes of this chain and of the chains before.
    """

    taken: set[str]
    inputs: list[Any] = field(default_factory=list)
    constants: list[np.ndarray] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    x: Any = None
    adds: bool = False
    sum: Any = None
    normed: Any = None
    stored: list[Any] = field(default_factory=list)
    products: list[Any] = field(default_factory=list)

    @property
    def values(self) -> list[Any]:
        """The values of the graph that the operation returns, in its order."""
        return [value for value in (self.sum, self.normed, *self.stored) if value is not None]

    @property
    def tokens(self) -> int:
        """The number of rows of an image."""
        return int(np.prod(shape_of(self.inputs[0])[:-1]))  # type: ignore[index]

    @property
    def attributes(self) -> dict[str, Any]:
        kinds, depths, columns, epsilons, steps, zeros, slopes, cubics = zip(*self.steps, strict=True)
        return {
            "width": shape_of(self.x)[-1] if self.x is not None else 0,  # type: ignore[index]
            "adds": self.adds,
            "sums": self.sum is not None,
            "kinds": list(kinds),
            "depths": list(depths),
            "columns": list(columns),
            "epsilons": list(epsilons),
            "steps": list(steps),
            "zeros": list(zeros),
            "slopes": list(slopes),
            "cubics": list(cubics),
        }


def chains_in(model: Any) -> list[Chain]:
    """Return the chains of an OpenVINO model, each of at least one product."""
    chains: list[Chain] = []
    taken: set[str] = set()
    for node in model.get_ordered_ops():
        if node.get_name() in taken:
            continue
        chain = Chain(taken)
        if node.get_type_name() == "ResidualNorm" and _is_float32(node.input_value(0)):
            _start_with_norm(chain, node)
        elif product := _int8_product(node):
            _start_with_values(chain, product)
        if chain.products:
            chains.append(chain)
    return chains


def share_in_chains(model: Any, chains: list[Chain]) -> float:
    """Return the share of the multiplications of all int8 products and convolutions that chains compute; 0 for none."""
    replaced = {node.get_name() for chain in chains for node in chain.products}
    inside = everywhere = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() in ("MatMul", "Convolution", "GroupConvolution"):
            work = _multiplications(node)
            everywhere += work
            inside += work if node.get_name() in replaced else 0
    return inside / everywhere if everywhere else 0.0


def _multiplications(node: Any) -> int:
    """Return how many multiplications of a row of the batch a node does with int8 weights, 0 if these are not int8."""
    right, shape = _dequantised(node.input_value(1)), shape_of(node.output(0))
    weights = constant(right[0]) if right else None
    if weights is None or shape is None:
        return 0
    columns = weights.shape[-1] if node.get_type_name() == "MatMul" else weights.shape[0]
    return int(np.prod(shape) * weights.size // columns)


def _int8_product(node: Any) -> Product | None:
    """Return the int8 product that a MatMul computes, or None for every other node."""
    attributes = node.get_attributes() if node.get_type_name() == "MatMul" else {"transpose_a": True}
    if attributes["transpose_a"] or attributes["transpose_b"] or not _is_float32(node.output(0)):
        return None
    left, right = (_dequantised(value) for value in node.input_values())
    weights = constant(right[0]) if right else None
    if left is None or right is None or weights is None or weights.dtype != np.int8 or weights.ndim != 2:
        return None
    source, step, zero = left
    _, scales, zeros = right
    depth, columns = weights.shape
    if depth % LANES or columns % LANES or step.size != 1 or zero.size != 1 or zeros.any():
        return None
    if (scales.size > 1 and scales.shape[-1] != columns) or scales.size not in (1, columns) or shape_of(source) is None:
        return None
    scale = np.broadcast_to(step.reshape(()) * scales.reshape(-1), columns).astype(np.float32)
    number_of_zero = int(zero.reshape(())) + _INT8[source.get_element_type().get_type_name()]
    start = -number_of_zero * weights.sum(0, dtype=np.int32)
    output, bias = node.output(0), np.zeros(columns, np.float32)
    added = _bias_behind(output, columns)
    if added is not None:
        output, bias = added
    return Product(node, source, weights, start, scale, bias, output)


# ---- grow a chain -------------------------------------------------------------------------------------------------


def _start_with_norm(chain: Chain, norm: Any) -> None:
    x, *rest = (norm.input_value(index) for index in range(len(norm.inputs())))
    chain.adds = len(rest) == 3
    chain.inputs = [x, rest[0]] if chain.adds else [x]
    chain.x = norm.output(1) if chain.adds else x
    if chain.adds:
        chain.sum = chain.x
    _add_norm(chain, norm)


def _start_with_values(chain: Chain, product: Product) -> None:
    """Start with the int8 values that a product multiplies, or with float32 values, which the first step quantises."""
    products = [product]
    grid = _grid_of(product.source)
    if grid is not None and _is_float32(grid[0].input_value(0)):
        quantised, steps, zero = grid
        products = _products_of(product.source)
        chain.inputs = [quantised.input_value(0)]
        chain.steps.append(Step(_QUANTISE, depth=product.weights.shape[0], steps=steps, zero=zero))
    elif product.source.get_element_type().get_type_name() == "i8":
        chain.inputs = [product.source]
    else:
        return
    _add_products(chain, products)


def _add_norm(chain: Chain, norm: Any) -> None:
    weight, bias = (constant(norm.input_value(len(norm.inputs()) - back)) for back in (2, 1))
    chain.constants += [weight, bias]
    chain.steps.append(Step(_NORM, epsilon=float(norm.get_attributes()["epsilon"])))
    chain.taken.add(norm.get_name())
    products = _products_of(norm.output(0))
    _add_products(chain, products)
    if not products:
        chain.normed = norm.output(0)


def _add_products(chain: Chain, products: list[Product]) -> None:
    if len(products) == 1:
        _add_product(chain, products[0])
    elif not _add_gated(chain, products):
        for product in products:
            _store(chain, product)


def _add_product(chain: Chain, product: Product) -> None:
    if (activation := _activation(product.output)) and _add_activated(chain, product, activation, activation.output):
        return
    if _add_gated(chain, _halves(product)):
        return
    reader = reader_of(product.output)
    node = (reader if reader is not None else product.output).get_node()
    kind = node.get_type_name() if reader is not None else "none, or several"
    if kind in ("Add", "ResidualNorm") and _joins_x(chain, product, node):
        _put_product(chain, product, Step(_ADD))
        chain.taken.add(node.get_name())
        chain.x = chain.sum = node.output(1 if kind == "ResidualNorm" else 0)
        if kind == "ResidualNorm":
            _add_norm(chain, node)
    else:
        _store(chain, product)


def _add_activated(chain: Chain, product: Product, activation: Activation, output: Any) -> bool:
    """Add a product, its activation and what follows if one product reads ``output`` quantised; else return False."""
    quantised = _quantised_activation(output)
    if quantised is None:
        return False
    following, steps, zero = quantised
    step = Step(activation.kind, steps=steps, zero=zero, slope=activation.slope, cubic=activation.cubic)
    _put_product(chain, product, step)
    _add_product(chain, following)
    return True


def _add_gated(chain: Chain, products: list[Product]) -> bool:
    """Add two products, of which the activation of one is multiplied by the other; else return False."""
    for gate, other in (products, products[::-1]) if len(products) == 2 else ():
        activation = _activation(gate.output)
        joined = reader_of(activation.output) if activation else None
        if activation is None or joined is None or joined.get_node().get_type_name() != "Multiply":
            continue
        factors = [joined.get_node().input_value(index) for index in range(2)]
        if other.output not in factors or reader_of(other.output) != joined or _quantised_activation(joined) is None:
            continue
        _put_product(chain, other, Step(_HOLD))
        return _add_activated(chain, gate, activation, joined)
    return False


def _store(chain: Chain, product: Product) -> None:
    _put_product(chain, product, Step(_OUT))
    chain.stored.append(product.output)


def _put_product(chain: Chain, product: Product, step: Step) -> None:
    depth, columns = product.weights.shape
    chain.constants += [_packed(product.weights), product.start, product.scale, product.bias]
    chain.steps.append(step._replace(depth=depth, columns=columns))
    if product.node.get_name() not in chain.taken:  # both halves of a product have its node
        chain.products.append(product.node)
    chain.taken.add(product.node.get_name())


def _joins_x(chain: Chain, product: Product, adder: Any) -> bool:
    """Return whether an Add or a ResidualNorm adds a product to the chain's x; a chain without x takes this one."""
    first, second = adder.input_value(0), adder.input_value(1)
    if adder.get_name() in chain.taken or (adder.get_type_name() == "ResidualNorm" and len(adder.inputs()) != 4):
        return False
    x = second if first == product.output else first
    if constant(x) is not None or not _is_float32(x) or x.get_partial_shape() != product.output.get_partial_shape():
        return False
    if chain.x is None:
        chain.x = x
        chain.inputs.append(x)
        return True
    readers = {target.get_node().get_name() for target in chain.x.get_target_inputs()}
    return x == chain.x and (chain.sum is None or readers == {adder.get_name()})


# ---- read the graph -----------------------------------------------------------------------------------------------


def _dequantised(value: Any) -> tuple[Any, np.ndarray, np.ndarray] | None:
    """Return (int8 value, step, number of 0) of (value - number of 0) * step, or None for every other value."""
    node = value.get_node()
    if node.get_type_name() != "Multiply":
        return None
    step = _numbers(node.input_value(1))
    node = node.input_value(0).get_node()
    zero: np.ndarray | None = np.zeros(1, np.float32)
    if node.get_type_name() == "Subtract":
        zero = _numbers(node.input_value(1))
        node = node.input_value(0).get_node()
    while node.get_type_name() == "Convert" and node.get_output_element_type(0).get_type_name() not in _INT8:
        source = node.input_value(0)
        if source.get_element_type().get_type_name() in _INT8:
            return None if step is None or zero is None else (source, step, zero)
        node = source.get_node()
    return None


def _is_float32(value: Any) -> bool:
    return str(value.get_element_type().get_type_name()) == "f32"


def _numbers(value: Any) -> np.ndarray | None:
    """Return a constant, also behind casts and reshapes, as float32; None for a computed value."""
    shape = value.get_partial_shape()
    while value.get_node().get_type_name() in ("Convert", "Reshape"):
        value = value.get_node().input_value(0)
    numbers = constant(value)
    return None if numbers is None or shape.is_dynamic else np.asarray(numbers, np.float32).reshape(shape.to_shape())


def _bias_behind(value: Any, columns: int) -> tuple[Any, np.ndarray] | None:
    """Return (the value after the bias, the bias) if the only reader of a product adds a constant to its columns."""
    added = reader_of(value)
    addition = constant_and_other(added, "addition") if added is not None else None
    if addition is None or not addition[0].size == columns == addition[0].shape[-1]:
        return None
    return added, np.asarray(addition[0], np.float32).reshape(-1)


def _products_of(value: Any) -> list[Product]:
    """Return the int8 products that multiply an int8 value; empty if another node reads the value too."""
    products: list[Product] = []
    values = [value]
    for each in values:  # grows
        for target in each.get_target_inputs():
            node = target.get_node()
            if node.get_type_name() in ("Convert", "Subtract", "Multiply"):
                values.append(node.output(0))
                continue
            product = _int8_product(node)
            if product is None or product.source != value:
                return []
            products.append(product)
    return products


def _halves(product: Product) -> list[Product]:
    """Return the products of both halves of the columns if the only reader of a product splits it there; else []."""
    targets = product.output.get_target_inputs()
    splits = [node for target in targets if (node := target.get_node()).get_type_name() in ("Split", "VariadicSplit")]
    half = len(product.bias) // 2
    if len(targets) != 1 or not splits or half % LANES:
        return []
    outputs = splits[0].outputs()
    if [shape_of(output)[-1] for output in outputs if shape_of(output)] != [half, half]:  # type: ignore[index]
        return []
    return [
        replace(
            product,
            weights=product.weights[:, columns],
            start=product.start[columns],
            scale=product.scale[columns],
            bias=product.bias[columns],
            output=output,
        )
        for output, columns in zip(outputs, (slice(half), slice(half, None)), strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Activation:
    """The activation of a product.  kind: `_GELU`, or `_SIGMOID` with its slope and cubic.  output: its value."""

    kind: int
    output: Any
    slope: float = 0.0
    cubic: float = 0.0


def _activation(value: Any) -> Activation | None:
    """Return the only reader of a value if it is GELU, SiLU y · σ(y) or quick GELU y · σ(1.702 y)."""
    readers = [target.get_node() for target in value.get_target_inputs()]
    if [reader.get_type_name() for reader in readers] == ["Gelu"]:
        (gelu,) = readers
        exact = gelu.get_attributes()["approximation_mode"].lower() == "erf"
        output = gelu.output(0)
        return Activation(_GELU, output) if exact else Activation(_SIGMOID, output, _TANH_SLOPE, _TANH_CUBIC)
    for last in readers if len(readers) == 2 else ():
        others = [factor for factor in last.input_values() if factor != value]
        sigmoid = others[0].get_node() if last.get_type_name() == "Multiply" and len(others) == 1 else None
        if sigmoid is None or sigmoid.get_type_name() != "Sigmoid" or len(others[0].get_target_inputs()) != 1:
            continue
        slope, source = constant_and_other(sigmoid.input_value(0), "multiplication") or (
            np.ones(1),
            sigmoid.input_value(0),
        )
        if source == value and slope.size == 1 and slope.reshape(()) > 0:
            return Activation(_SIGMOID, last.output(0), float(slope.reshape(())))
    return None


def _quantised_activation(value: Any) -> tuple[Product, float, float] | None:
    """Return (the product that reads it, steps in 1, number of 0) of a quantised activation; None for other readers."""
    reader = reader_of(value)
    values = reader_of(reader) if reader is not None else None
    grid = _grid_of(values) if values is not None else None
    products = _products_of(values) if grid is not None else []
    if grid is None or len(products) != 1:
        return None
    return products[0], grid[1], grid[2]


def _grid_of(values: Any) -> tuple[Any, float, float] | None:
    """Return (FakeQuantize, steps in 1, number of 0) of int8 values that a FakeQuantize computes on a single grid."""
    node = values.get_node()
    if node.get_type_name() != "Convert" or values.get_element_type().get_type_name() not in _INT8:
        return None
    node = node.input_value(0).get_node()
    bounds = bounds_of(node)
    if bounds is None:
        return None
    low, high, *ends = bounds
    expected = {"u8": [0.0, 255.0], "i8": [-128.0, 127.0]}[values.get_element_type().get_type_name()]
    if ends != expected or high <= low:
        return None
    steps = 255 / (high - low)
    return node, steps, -low * steps


def _packed(weights: np.ndarray) -> np.ndarray:
    """Return int8 weights (depth, columns) as `chain_on_vectors.h` reads them.  The type only stands for 4 bytes."""
    depth, columns = weights.shape
    panels = (weights[:, first : first + _PANEL] for first in range(0, columns, _PANEL))
    fours = (panel.reshape(depth // 4, 4, -1).transpose(0, 2, 1).reshape(-1) for panel in panels)
    return np.concatenate(list(fours)).view(np.int32)
