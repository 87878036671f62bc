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
from gmmvit_deploy.graphs.wiring import Wiring, attribute_of, order_of

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

    from gmmvit_deploy.inference.precision import Role

_HEADS_LAST, _HEADS_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_LINEAR = frozenset({"Conv", "Gemm", "MatMul"})
_ON_SIZES = frozenset({"Add", "Div", "Mul", "Sub"}) | SHAPE_OPERATORS


def pads_by_zero(node: NodeProto, wiring: Wiring) -> bool:
    if node.op_type != "Pad" or attribute_of(node, "mode", b"constant") != b"constant":
        return False
    if len(node.input) < 3 or not node.input[2]:
        return True
    value = wiring.array(node.input[2])
    return value is not None and not value.any()


def is_activation(node: NodeProto, wiring: Wiring, activated: set[str]) -> bool:
    """activated: the tensors that earlier activations of the graph produce, including outputs of Gelu."""
    if node.op_type in ("Relu", "Sigmoid"):
        return True
    if node.op_type != "Mul":
        return False
    index = wiring.constant_input(node)
    if index is None:
        return bool(activated.intersection(node.input))
    # The factor of quick GELU multiplies only the input of the Sigmoid.
    return wiring.sizes[node.input[index]] == 1 and wiring.only_reader(node.output[0], "Sigmoid") is not None


def root_mean_square_nodes(graph: GraphProto, wiring: Wiring) -> set[str]:
    """Return the names of Pow or Mul, ReduceMean, Add, Sqrt, and Div, or Reciprocal and Mul, of each norm."""
    names: set[str] = set()
    for root in graph.node:
        total = wiring.made_by(root.input[0], "Add") if root.op_type == "Sqrt" else None
        index = wiring.constant_input(total) if total is not None else None
        if total is None or index is None:
            continue
        mean = wiring.made_by(total.input[1 - index], "ReduceMean")
        square = wiring.maker.get(mean.input[0]) if mean is not None else None
        if mean is None or square is None or square.op_type not in ("Mul", "Pow"):
            continue
        inverse = wiring.only_reader(root.output[0], "Reciprocal")
        last = wiring.only_reader((inverse or root).output[0], "Div" if inverse is None else "Mul")
        if last is not None and set(wiring.computed_inputs(square)) < set(last.input):
            names |= {node.name for node in (square, mean, total, root, inverse, last) if node is not None}
    return names


def adds_token_sum(node: NodeProto, wiring: Wiring) -> bool:
    products = [product for name in node.input if (product := wiring.made_by(name, "Mul")) is not None]
    return node.op_type == "Add" and any(
        wiring.constant_input(product) is not None and any(wiring.made_by(name, "ReduceSum") for name in product.input)
        for product in products
    )


def rotation_nodes(graph: GraphProto, wiring: Wiring) -> set[str]:
    """Return the names of the nodes that rotate Q or K: the Neg, if any, both Mul nodes and the Add."""
    names = _swapping_rotations(graph, wiring)
    for negation in graph.node:
        if negation.op_type != "Neg":
            continue
        node = wiring.only_reader(negation.output[0])
        while node is not None and node.op_type in SHAPE_OPERATORS:
            node = wiring.only_reader(node.output[0])
        if node is None or not _scales_by_constant(node, wiring):
            continue
        total = wiring.only_reader(node.output[0], "Add")
        if total is None:
            continue
        products = [wiring.maker.get(name) for name in total.input]
        if all(product is not None and _scales_by_constant(product, wiring) for product in products):
            names |= {negation.name, total.name, *(product.name for product in products if product is not None)}
    return names


def _swapping_rotations(graph: GraphProto, wiring: Wiring) -> set[str]:
    names: set[str] = set()
    for total in graph.node:
        products = [wiring.maker.get(name) for name in total.input] if total.op_type == "Add" else []
        scaled = [node for node in products if node is not None and _scales_by_constant(node, wiring)]
        if len(scaled) != 2:
            continue
        (first,), (second,) = (wiring.computed_inputs(node) for node in scaled)
        for plain, swapped in ((first, second), (second, first)):
            if _unswapped(swapped, wiring) == _unshaped(plain, wiring):
                names |= {total.name, *(node.name for node in scaled)}
    return names


def _unswapped(name: str, wiring: Wiring) -> str | None:
    """Return the tensor x if the tensor ``name`` joins pieces that were cut from x, else None."""
    joined = wiring.made_by(_unshaped(name, wiring), "Concat")
    cuts = [wiring.maker.get(piece) for piece in joined.input] if joined is not None else []
    sources = {
        _unshaped(cut.input[0], wiring) if cut is not None and cut.op_type in ("Slice", "Split") else None
        for cut in cuts
    }
    return sources.pop() if len(sources) == 1 else None


def _unshaped(name: str, wiring: Wiring) -> str:
    """Return the tensor before the Reshape nodes that produce the tensor ``name``."""
    while (reshape := wiring.made_by(name, "Reshape")) is not None:
        name = reshape.input[0]
    return name


def _scales_by_constant(node: NodeProto, wiring: Wiring) -> bool:
    return node.op_type == "Mul" and wiring.constant_input(node) is not None and bool(wiring.computed_inputs(node))


def sum_norm_nodes(graph: GraphProto, wiring: Wiring) -> set[str]:
    names: set[str] = set()
    for division in graph.node:
        if division.op_type != "Div":
            continue
        divided, divisor = division.input
        added = wiring.made_by(divisor, "Add")
        if added is not None and wiring.constant_input(added) is not None:
            divisor = next(iter(wiring.computed_inputs(added)), "")
        total = wiring.made_by(divisor, "ReduceSum") or wiring.made_by(divisor, "ReduceL2")
        if total is not None and total.input[0] == divided:
            names |= {division.name, total.name, *([added.name] if added is not None else [])}
    return names


def talking_heads(graph: GraphProto, wiring: Wiring) -> dict[str, Role]:
    """Map the nodes of each head mixing to their roles: Transpose, MatMul, Add if there is a bias, Transpose."""
    roles: dict[str, Role] = {}
    for node in graph.node:
        if node.op_type != "MatMul" or wiring.constant_input(node) != 1:
            continue
        weight = wiring.initializers.get(node.input[1])
        before, after = wiring.made_by(node.input[0], "Transpose"), wiring.only_reader(node.output[0])
        bias = after if after is not None and after.op_type == "Add" else None
        back = wiring.only_reader(bias.output[0]) if bias is not None else after
        square = weight is not None and len(weight.dims) == 2 and weight.dims[0] == weight.dims[1]
        if not square or before is None or back is None:
            continue
        if order_of(before) == _HEADS_LAST and back.op_type == "Transpose" and order_of(back) == _HEADS_FIRST:
            roles.update({node.name: "mixing", before.name: "shape", back.name: "shape"})
            if bias is not None:
                roles[bias.name] = "bias"
    return roles


def head_nodes(graph: GraphProto, wiring: Wiring) -> set[str]:
    """Return the names of the last linear maps and of the nodes after them; else of the nodes with an output."""
    names: set[str] = set()
    for value in graph.output:
        last = wiring.maker.get(value.name)
        if last is None:
            continue
        linear = _down_to_linear_maps(last, wiring)
        names |= {last.name} if linear is None else linear
    return names


def _down_to_linear_maps(node: NodeProto, wiring: Wiring) -> set[str] | None:
    if node.op_type in _LINEAR and wiring.constant_input(node) is not None:
        return {node.name}
    if node.op_type == "ReduceMax":  # the largest logits over all tokens, of a head that reads every token
        return _linear_map_before(node, wiring)
    if node.op_type not in ("Add", "Div", "Mul"):
        return None
    names = {node.name}
    for name in wiring.computed_inputs(node):
        maker = wiring.maker.get(name)
        part = None if maker is None else _down_to_linear_maps(maker, wiring)
        if part is None:
            return None
        names |= part
    return names


def _linear_map_before(node: NodeProto, wiring: Wiring) -> set[str] | None:
    maker = wiring.maker.get(node.input[0])
    if maker is not None and maker.op_type == "Add" and wiring.constant_input(maker) is not None:
        maker = wiring.maker.get(wiring.computed_inputs(maker)[0])
    if maker is None or maker.op_type not in _LINEAR or wiring.constant_input(maker) is None:
        return None
    return {maker.name}


def size_values(graph: GraphProto, wiring: Wiring) -> set[str]:
    """Return the tensors that hold sizes: outputs of Shape, and whole numbers computed only from such outputs."""
    from onnx import TensorProto

    whole = {
        name
        for name, tensor in wiring.initializers.items()
        if tensor.data_type in (TensorProto.INT64, TensorProto.INT32)
    }
    sizes: set[str] = set()
    for node in graph.node:
        of_sizes = node.op_type in _ON_SIZES and not sizes.isdisjoint(node.input)
        if node.op_type == "Shape" or (of_sizes and all(name in sizes or name in whole for name in node.input if name)):
            sizes.update(node.output)
    return sizes
