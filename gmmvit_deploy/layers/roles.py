"""What a module's operators are for, declared where the module is written.

Two ways, so that nothing has to be guessed from an exported graph:

    with_role(nn.Linear(...), "projection")        a layer of PyTorch whose purpose its owner knows
    operator_roles = {"add": "residual"}           a class attribute: PyTorch's operator, as in ``aten.add`` → its role

A LayerNorm and a GELU have one purpose each. The bias that a linear map adds has the role ``bias``. A step on the
scores (`gmmvit_deploy.scores`) has one role for all that it computes. What only moves values needs no role.
The roles are explained in ``graphs/roles.py``; the exporter writes them into the nodes (``export/declared_roles.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from torch import nn

from gmmvit_deploy.precision import Role

__all__ = ["layer_role", "operator_role", "with_role", "with_role_of"]

_Layer = TypeVar("_Layer", bound=nn.Module)
_SINGLE_PURPOSE: Mapping[type[nn.Module], Role] = {nn.LayerNorm: "norm", nn.GELU: "gelu"}


def with_role(layer: _Layer, role: Role) -> _Layer:
    """Declare what a layer is for; return the layer itself."""
    layer.role = role  # type: ignore[assignment]  # nn.Module types every attribute as a tensor or module
    return layer


def with_role_of(other: nn.Module, layer: _Layer) -> _Layer:
    """Declare that a layer is for what the layer in whose place it stands was for."""
    role = layer_role(other)
    return layer if role is None else with_role(layer, role)


def layer_role(layer: nn.Module) -> Role | None:
    """The role of all that this layer computes, or None where its operators have roles of their own."""
    declared = getattr(layer, "role", None)
    return cast("Role", declared) if declared is not None else _SINGLE_PURPOSE.get(type(layer))


def operator_role(module: nn.Module, operator: str) -> Role | None:
    """The role that a module's class declares for one of PyTorch's operators, or None.

    operator: without namespace and overload: ``add`` for ``aten.add.Tensor``.
    """
    declared: Mapping[str, Role] = getattr(type(module), "operator_roles", {})
    return declared.get(operator)
