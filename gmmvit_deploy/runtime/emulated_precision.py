"""Run a graph of any precision on the CPU with every rounding it asks for.

ONNX Runtime computes float16 nodes in float32 and rounds their results; with its optimisations
off it leaves no rounding out. It has no bfloat16 kernels, so those nodes are written in float32
with a rounding to bfloat16 after each (`graphs/emulate.py`). The order of sums within a product is
not imitated: every GPU kernel chooses its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.emulate import without_bfloat16
from gmmvit_deploy.runtime.onnxruntime import session_from_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

__all__ = ["emulated_logits"]


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
