"""Refuse a precision below float32 for a graph that declares the role ``unknown`` for an operator.

The precision policy assigns a data type to each known role. How an operator without a known role behaves in half
precision was never checked, so a model with such an operator runs in float32 only. A graph from another exporter does
not declare roles; `cast` leaves the operators without a known role of such a graph in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.declared import declared_role

if TYPE_CHECKING:
    from onnx import GraphProto

    from gmmvit_deploy.precision import Precision

__all__ = ["require_known_roles"]


def require_known_roles(graph: GraphProto, precision: Precision, *, what: str) -> None:
    """Check that no node declares the role ``unknown``.  Every graph is accepted in fp32.

    what: the subject of the error message, for example the path of the bundle.
    Errors: ExportError that names the first node that declares the role ``unknown``, with its operator, and all
    operators of such nodes.
    """
    if precision == "fp32":
        return
    unknown = [node for node in graph.node if declared_role(node) == "unknown"]
    if not unknown:
        return
    first = unknown[0]
    named = first.name.rpartition("/")[2].partition(".")[0] == first.op_type
    name = first.name if named else f"{first.name} ({first.op_type})"
    operators = ", ".join(dict.fromkeys(node.op_type for node in unknown))
    raise ExportError(
        f"{what}: {precision} needs a known role for each operator; node {name} has none; this model runs in fp32",
        hint=f"remove {precision} from the precisions; operators of this model without a known role: {operators}",
    )
