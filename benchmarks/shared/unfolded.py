"""What people do without this project: the trained module, masks unfolded, exported in half precision."""

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
    """float32 images → the module in float16 → float32 logits."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"_to_copy": "shape"}

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()
        self.spec = model.spec

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.half()).float()


def unfolded_half(model: Model, path: Path) -> onnx.ModelProto:
    """Written to ``path``."""
    proto = onnx_from_model(Half(model).eval(), preprocessing=None, max_batch=8)
    onnx.save(proto, path)
    return proto
