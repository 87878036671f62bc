"""Export a module as users do without this project."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import nn

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.onnx_from_model import OPSET, quiet_exporter


def straight_graph(model: nn.Module, image_shape: tuple[int, ...], max_batch: int) -> ir.Model:
    """Export a module as users do: PyTorch's exporter with its optimisation, and a dynamic batch, of (C, height,
    width).
    """
    with quiet_exporter():
        program = torch.onnx.export(
            model,
            (torch.zeros(2, *image_shape),),
            dynamo=True,
            opset_version=OPSET,
            input_names=["tensor"],
            output_names=["logits"],
            dynamic_shapes=_dynamic_batch(max_batch),
            verbose=False,
        )
    if program is None:
        raise ExportError(f"the ONNX exporter of torch {torch.__version__} returned no graph")
    return program.model


def straight_program(model: nn.Module, image_shape: tuple[int, ...], max_batch: int) -> torch.export.ExportedProgram:
    """Trace a module of (C, height, width) as users of PyTorch's own compilers do, with a dynamic batch."""
    return torch.export.export(model, (torch.zeros(2, *image_shape),), dynamic_shapes=_dynamic_batch(max_batch))


def _dynamic_batch(max_batch: int) -> tuple[dict[int, torch.export.Dim]]:
    return ({0: torch.export.Dim("batch", min=1, max=max_batch)},)
