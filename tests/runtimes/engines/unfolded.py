"""Export the trained module in half precision without folding the masks, as users do without this project."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir
from torch import Tensor

from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.model import Model


class Half(Model):
    """A copy of the module that computes in float16, with float32 images and float32 logits."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"_to_copy": "shape"}

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()
        self.spec = model.spec

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.half()).float()


def unfolded_half(model: Model, path: Path) -> ir.Model:
    """Export the model as `Half` does, write the graph to ``path``, and return the graph."""
    graph = onnx_from_model(Half(model).eval(), preprocessing=None, max_batch=8)
    ir.save(graph, path)
    return graph
