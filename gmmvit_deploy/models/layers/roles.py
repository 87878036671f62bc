"""Declare the role of each operator in the module that runs the operator.

A role states the purpose of an operator, such as ``projection`` or ``norm``. The role determines the precision of the
operator. The two kinds of declaration make it unnecessary to guess roles from an exported graph:

    with_role(nn.Linear(...), "projection")        for a PyTorch layer whose purpose depends on the surrounding module
    operator_roles = {"add": "residual"}           class attribute: PyTorch operator (``add`` for ``aten.add``) → role

LayerNorm and GELU have a fixed role. The bias that a linear layer adds has the role ``bias``. A step on the scores
(`gmmvit_deploy.models.scores`) has a single role for all its operators. Operators that only move data need no role.
``graphs/roles.py`` explains the roles. The exporter writes the roles into the nodes (``exporting/_declared_roles.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from torch import nn

from gmmvit_deploy.inference.precision import Role

_Layer = TypeVar("_Layer", bound=nn.Module)
_SINGLE_PURPOSE: Mapping[type[nn.Module], Role] = {nn.LayerNorm: "norm", nn.GELU: "gelu"}


def with_role(layer: _Layer, role: Role) -> _Layer:
    """Set the role of a layer and return the layer."""
    layer.role = role  # type: ignore[assignment]  # nn.Module types every attribute as a tensor or module
    return layer


def with_role_of(other: nn.Module, layer: _Layer) -> _Layer:
    """Give ``layer``, which replaces ``other``, the role of ``other`` if it has one, and return ``layer``."""
    role = layer_role(other)
    return layer if role is None else with_role(layer, role)


def layer_role(layer: nn.Module) -> Role | None:
    """Return the common role of all operators of a layer, or None if the layer has no such role."""
    declared = getattr(layer, "role", None)
    return cast("Role", declared) if declared is not None else _SINGLE_PURPOSE.get(type(layer))


def operator_role(module: nn.Module, operator: str) -> Role | None:
    """Return the role that the module's class declares for an operator, such as ``add`` for ``aten.add.Tensor``."""
    declared: Mapping[str, Role] = getattr(type(module), "operator_roles", {})
    return declared.get(operator)
