"""Export the trained module with unfolded masks in half precision, as users do without this project."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import onnx
from torch import Tensor, nn

from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.precision import Role


class Half(nn.Module):
    """Run a copy of the module in float16: float32 images to float32 logits."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"_to_copy": "shape"}

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()
        self.spec = model.spec

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.half()).float()


def unfolded_half(model: Model, path: Path) -> onnx.ModelProto:
    """Export `Half` of the model, and write it to ``path``."""
    proto = onnx_from_model(Half(model).eval(), preprocessing=None, max_batch=8)
    onnx.save(proto, path)
    return proto
