"""A graph in any precision, run on the CPU with every rounding it asks for.

ONNX Runtime computes float16 nodes in float32 and rounds what they give; with its optimisations
off it leaves no rounding out. It has no bfloat16 kernels, so those nodes are written in float32
with a rounding to bfloat16 after each. What is not imitated is the order of sums within a
product, which every GPU kernel chooses for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.rewrite import rewrite_graph
from gmmvit_deploy.runtime.onnxruntime import session_from_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

__all__ = ["emulated_logits", "without_bfloat16"]


def emulated_logits(proto: ModelProto, inputs: NDArray[Any], *, name: str, batch: int = 8) -> NDArray[Any]:
    """Logits (B, C) float32.  name: what errors call the graph.

    Errors: BundleError when ONNX Runtime cannot load it.
    """
    import numpy as np

    session = session_from_bytes(without_bfloat16(proto).SerializeToString(), name, exact=True)
    (image,) = (one.name for one in proto.graph.input)
    parts = [session.run(["logits"], {image: inputs[i : i + batch]})[0] for i in range(0, len(inputs), batch)]
    logits: NDArray[Any] = np.concatenate(parts)
    return logits


def without_bfloat16(proto: ModelProto) -> ModelProto:
    """The same function, bfloat16 rounding included, in a graph whose nodes compute in float32."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper, shape_inference

    if not any(one.data_type == TensorProto.BFLOAT16 for one in proto.graph.initializer):
        return proto
    out = shape_inference.infer_shapes(proto, strict_mode=True)
    rounded = {one.name for one in out.graph.value_info if one.type.tensor_type.elem_type == TensorProto.BFLOAT16}
    nodes = []
    for node in out.graph.node:
        names = [name for name in node.output if name in rounded]
        sources = {name: f"{name}.exact" for name in names}
        if names and node.op_type == "Cast":
            sources = {names[0]: node.input[0]}
        else:
            outputs = [sources.get(name, name) for name in node.output]
            del node.output[:]
            node.output.extend(outputs)
            nodes.append(node)
        for name, source in sources.items():
            nodes += [
                helper.make_node("Cast", [source], [f"{name}.bf16"], name=f"{name}/round", to=TensorProto.BFLOAT16),
                helper.make_node("Cast", [f"{name}.bf16"], [name], name=f"{name}/widen", to=TensorProto.FLOAT),
            ]
    constants = [
        numpy_helper.from_array(numpy_helper.to_array(one).astype(np.float32), one.name)
        if one.data_type == TensorProto.BFLOAT16
        else one
        for one in out.graph.initializer
    ]
    rewrite_graph(out.graph, nodes, constants)
    return out
