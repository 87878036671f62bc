"""Folded model → ONNX graph."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from gmmvit_deploy.errors import ExportError, InputError
from gmmvit_deploy.export.declared_roles import declare_roles, name_nodes
from gmmvit_deploy.graphs.declared import ATTENTION_KEY, ROLE_KEY
from gmmvit_deploy.images import ImageSpec
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.precision import Role
from gmmvit_deploy.specs import input_shape

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["OPSET", "OUTPUT_NAME", "PixelInput", "onnx_from_model"]

OPSET = 20  # the first with Gelu; LayerNormalization came with 17
OUTPUT_NAME = "logits"


class PixelInput(nn.Module):
    """uint8 pixels (B, height, width, channels) → the model's logits; scaling and normalisation inside.

    x = (pixels / 255 − mean) / std, in this order: the bits that training's ToTensor and Normalize give.
    """

    mean: Tensor
    std: Tensor
    operator_roles: ClassVar[Mapping[str, Role]] = dict.fromkeys(("_to_copy", "to", "div", "sub"), "input")

    def __init__(self, model: nn.Module, image: ImageSpec) -> None:
        """Errors: InputError where the images have no mean and std."""
        super().__init__()
        if image.normalisation is None:
            raise InputError("a graph that takes pixels normalises them, so the images need mean and std")
        mean, std = image.normalisation
        self.model = model
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, pixels: UInt8[Tensor, "batch height width channels"]) -> Float[Tensor, "batch classes"]:
        images = (pixels.to(torch.float32) / 255.0 - self.mean) / self.std
        logits: Tensor = self.model(images.permute(0, 3, 1, 2))
        return logits


def onnx_from_model(model: Model, *, preprocessing: ImageSpec | None, max_batch: int) -> ModelProto:
    """Export a folded model.

    preprocessing: given, the graph takes ``pixels`` (uint8, B × height × width × channels) and
    normalises them; None, it takes ``tensor`` (float32, B × channels × height × width). The output is
    ``logits`` (float32, B×C); B is dynamic.
    Errors: ExportError when the exporter fails, or when a module declares no role for an operator of its own.
    """
    if preprocessing is None:
        module: nn.Module = model
        name, example = "tensor", torch.zeros(2, *input_shape(model.spec))
    else:
        module = PixelInput(model, preprocessing).eval()
        name, example = "pixels", torch.zeros(2, *preprocessing.pixels_shape, dtype=torch.uint8)
    # torch.export needs a range of more than one value to call a dimension dynamic.
    batch = torch.export.Dim("batch", min=1, max=max(2, max_batch))
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=[name],
                output_names=[OUTPUT_NAME],
                dynamic_shapes=({0: batch},),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as exc:
        raise ExportError(f"the torch {torch.__version__} exporter failed: {exc}") from exc
    if program is None:
        raise ExportError(f"the torch {torch.__version__} exporter returned nothing")
    proto = program.model_proto
    name_nodes(proto)
    declare_roles(proto, module)
    _strip_traces(proto)
    return proto


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of its own progress, deprecations and absent torchvision; none is ours."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _strip_traces(proto: ModelProto) -> None:
    """Drop the exporter's notes: they name paths on this machine and change from run to run."""
    del proto.metadata_props[:]
    for part in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        del part.metadata_props[:]
    for node in proto.graph.node:
        kept = [(note.key, note.value) for note in node.metadata_props if note.key in (ROLE_KEY, ATTENTION_KEY)]
        del node.metadata_props[:]
        for key, value in kept:
            node.metadata_props.add(key=key, value=value)
        node.ClearField("doc_string")
    for initializer in proto.graph.initializer:
        initializer.ClearField("doc_string")
        del initializer.metadata_props[:]
    del proto.graph.metadata_props[:]
