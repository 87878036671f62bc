"""Recognise operators whose role depends on several nodes: activations, the rotation of Q and K, head mixing, the head.

    activation     max(x, 0);  σ(x);  x · σ(x) (SiLU);  x · σ(1.702 x) (quick GELU);  a gate, activation(x) · y
    rotation       x ∘ cos + turned(x) ∘ sin, where turned(x) swaps pairs of features and negates one feature of each
                   pair (rotary position embedding), or x ∘ cos + swapped(x) ∘ sin, where the signs are in ``sin``
    root mean square   x / √(mean(x²) + ε), a norm without centring
    token sum      y + f · Σ_j x_j with a constant f: a bias that depends on the sum over the tokens
    head mixing    a linear map of the heads between two Transposes: (B, H, n, n) → (B, n, n, H) → (B, H, n, n)
    norm           x / Σ x or x / (ε + Σ x), the division of a tensor by its sum (L1 norm of external attention), and
                   x / |x|, by its length (the image embedding of CLIP)
    head           the linear maps that compute the logits, and the sum or mean of two, as in a distilled model

`guessed_roles` turns the results into roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS
from gmmvit_deploy.graphs.wiring import Constants, made_by, only_reader, order_of, producer_of, values_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from gmmvit_deploy.inference.precision import Role

_HEADS_LAST, _HEADS_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_LINEAR = frozenset({"Conv", "Gemm", "MatMul"})
_ON_SIZES = frozenset({"Add", "Div", "Mul", "Sub"}) | SHAPE_OPERATORS


def pads_by_zero(node: ir.Node) -> bool:
    if node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "constant":
        return False
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    value = values_of(node.inputs[2])
    return value is not None and not value.any()


def is_activation(node: ir.Node, constants: Constants, activated: set[ir.Value | None]) -> bool:
    """activated: the tensors that earlier activations of the graph produce, including outputs of Gelu."""
    if node.op_type in ("Relu", "Sigmoid"):
        return True
    if node.op_type != "Mul":
        return False
    index = constants.index(node)
    if index is None:
        return bool(activated.intersection(node.inputs))
    # The factor of quick GELU multiplies only the input of the Sigmoid.
    return constants.sizes[node.inputs[index]] == 1 and only_reader(node.outputs[0], "Sigmoid") is not None


def root_mean_square_nodes(graph: ir.Graph, constants: Constants) -> set[ir.Node]:
    """Return Pow or Mul, ReduceMean, Add, Sqrt, and Div, or Reciprocal and Mul, of each norm."""
    nodes: set[ir.Node] = set()
    for root in graph:
        total = made_by(root.inputs[0], "Add") if root.op_type == "Sqrt" else None
        index = constants.index(total) if total is not None else None
        if total is None or index is None:
            continue
        mean = made_by(total.inputs[1 - index], "ReduceMean")
        square = producer_of(mean.inputs[0]) if mean is not None else None
        if mean is None or square is None or square.op_type not in ("Mul", "Pow"):
            continue
        inverse = only_reader(root.outputs[0], "Reciprocal")
        last = only_reader((inverse or root).outputs[0], "Div" if inverse is None else "Mul")
        if last is not None and set(constants.computed(square)) < set(last.inputs):
            nodes |= {node for node in (square, mean, total, root, inverse, last) if node is not None}
    return nodes


def adds_token_sum(node: ir.Node, constants: Constants) -> bool:
    products = [product for value in node.inputs if (product := made_by(value, "Mul")) is not None]
    return node.op_type == "Add" and any(
        constants.index(product) is not None and any(made_by(value, "ReduceSum") for value in product.inputs)
        for product in products
    )


def rotation_nodes(graph: ir.Graph, constants: Constants) -> set[ir.Node]:
    """Return the nodes that rotate Q or K: the Neg, if any, both Mul nodes and the Add."""
    nodes = _swapping_rotations(graph, constants)
    for negation in graph:
        if negation.op_type != "Neg":
            continue
        node = only_reader(negation.outputs[0])
        while node is not None and node.op_type in SHAPE_OPERATORS:
            node = only_reader(node.outputs[0])
        if node is None or not _scales_by_constant(node, constants):
            continue
        total = only_reader(node.outputs[0], "Add")
        if total is None:
            continue
        products = [producer_of(value) for value in total.inputs]
        if all(product is not None and _scales_by_constant(product, constants) for product in products):
            nodes |= {negation, total, *(product for product in products if product is not None)}
    return nodes


def _swapping_rotations(graph: ir.Graph, constants: Constants) -> set[ir.Node]:
    nodes: set[ir.Node] = set()
    for total in graph:
        products = [producer_of(value) for value in total.inputs] if total.op_type == "Add" else []
        scaled = [node for node in products if node is not None and _scales_by_constant(node, constants)]
        if len(scaled) != 2:
            continue
        (first,), (second,) = (constants.computed(node) for node in scaled)
        for plain, swapped in ((first, second), (second, first)):
            if _unswapped(swapped) is _unshaped(plain):
                nodes |= {total, *scaled}
    return nodes


def _unswapped(value: ir.Value) -> ir.Value | None:
    """Return the tensor x if the tensor ``value`` joins pieces that were cut from x, else None."""
    joined = made_by(_unshaped(value), "Concat")
    cuts = [producer_of(piece) for piece in joined.inputs] if joined is not None else []
    sources = {
        _unshaped(cut.inputs[0]) if cut is not None and cut.op_type in ("Slice", "Split") else None for cut in cuts
    }
    return sources.pop() if len(sources) == 1 else None


def _unshaped(value: ir.Value | None) -> ir.Value | None:
    """Return the tensor before the Reshape nodes that compute ``value``."""
    while (reshape := made_by(value, "Reshape")) is not None:
        value = reshape.inputs[0]
    return value


def _scales_by_constant(node: ir.Node, constants: Constants) -> bool:
    return node.op_type == "Mul" and constants.index(node) is not None and bool(constants.computed(node))


def sum_norm_nodes(graph: ir.Graph, constants: Constants) -> set[ir.Node]:
    nodes: set[ir.Node] = set()
    for division in graph:
        if division.op_type != "Div":
            continue
        divided, divisor = division.inputs
        added = made_by(divisor, "Add")
        if added is not None and constants.index(added) is not None:
            divisor = next(iter(constants.computed(added)), None)
        total = made_by(divisor, "ReduceSum") or made_by(divisor, "ReduceL2")
        if total is not None and total.inputs[0] is divided:
            nodes |= {division, total, *([added] if added is not None else [])}
    return nodes


def talking_heads(graph: ir.Graph, constants: Constants) -> dict[ir.Node, Role]:
    """Map the nodes of each head mixing to their roles: Transpose, MatMul, Add if there is a bias, Transpose."""
    roles: dict[ir.Node, Role] = {}
    for node in graph:
        if node.op_type != "MatMul" or constants.index(node) != 1:
            continue
        shape = node.inputs[1].shape if node.inputs[1] is not None else None
        before, after = made_by(node.inputs[0], "Transpose"), only_reader(node.outputs[0])
        bias = after if after is not None and after.op_type == "Add" else None
        back = only_reader(bias.outputs[0]) if bias is not None else after
        square = shape is not None and len(shape) == 2 and shape[0] == shape[1]
        if not square or before is None or back is None:
            continue
        if order_of(before) == _HEADS_LAST and back.op_type == "Transpose" and order_of(back) == _HEADS_FIRST:
            roles.update({node: "mixing", before: "shape", back: "shape"})
            if bias is not None:
                roles[bias] = "bias"
    return roles


def head_nodes(graph: ir.Graph, constants: Constants) -> set[ir.Node]:
    """Return the last linear maps and the nodes after them; else the nodes with an output."""
    nodes: set[ir.Node] = set()
    for value in graph.outputs:
        last = value.producer()
        if last is None:
            continue
        linear = _down_to_linear_maps(last, constants)
        nodes |= {last} if linear is None else linear
    return nodes


def _down_to_linear_maps(node: ir.Node, constants: Constants) -> set[ir.Node] | None:
    if node.op_type in _LINEAR and constants.index(node) is not None:
        return {node}
    if node.op_type == "ReduceMax":  # the largest logits over all tokens, of a head that reads every token
        return _linear_map_before(node, constants)
    if node.op_type not in ("Add", "Div", "Mul"):
        return None
    nodes = {node}
    for value in constants.computed(node):
        maker = value.producer()
        part = None if maker is None else _down_to_linear_maps(maker, constants)
        if part is None:
            return None
        nodes |= part
    return nodes


def _linear_map_before(node: ir.Node, constants: Constants) -> set[ir.Node] | None:
    maker = producer_of(node.inputs[0])
    if maker is not None and maker.op_type == "Add" and constants.index(maker) is not None:
        maker = constants.computed(maker)[0].producer()
    if maker is None or maker.op_type not in _LINEAR or constants.index(maker) is None:
        return None
    return {maker}


def size_values(graph: ir.Graph) -> set[ir.Value | None]:
    """Return the tensors that hold sizes: outputs of Shape, and whole numbers computed only from such outputs."""
    import onnx_ir as ir

    whole = {value for value in graph.initializers.values() if value.dtype in (ir.DataType.INT64, ir.DataType.INT32)}
    sizes: set[ir.Value | None] = set()
    for node in graph:
        of_sizes = node.op_type in _ON_SIZES and not sizes.isdisjoint(node.inputs)
        if node.op_type == "Shape" or (of_sizes and whole.union(sizes, [None]).issuperset(node.inputs)):
            sizes.update(node.outputs)
    return sizes
