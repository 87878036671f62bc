"""Roles come from the declarations of modules, not from rules on the exported graph."""

from __future__ import annotations

import sys

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model, quiet_exporter
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.specs import MaskSpec
from tests.models.folding.test_passes import small

pytestmark = pytest.mark.integration
MASK = MaskSpec(kind="gmm", kernels=2)


def exported(model: Model) -> ir.Model:
    return onnx_from_model(fold(model).model, preprocessing=None, max_batch=4)


def test_progress_is_printed_while_the_exporter_runs_but_no_graph(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet_exporter():
        print("· export: fold the masks, for 15 s so far", file=sys.stderr)
        print("def forward(self, x):\n    return x", file=sys.stderr)
        print("class GraphModule(torch.nn.Module): ...")
    assert capsys.readouterr() == ("", "· export: fold the masks, for 15 s so far\n")


def test_a_declared_role_decides_the_data_type() -> None:
    """A linear map in the middle of the network that is declared as the head stays out of int8."""
    model = small(MASK)
    block = model.get_submodule("blocks.0.mlp.0")
    images = [np.random.default_rng(0).standard_normal((4, 3, 16, 16), dtype=np.float32)]
    options = {"preprocessing": None, "max_batch": 4, "calibration": images}

    def quantised(graph: ir.Model) -> set[str]:
        return {node.name.partition("/")[0] for node in graph.graph if node.op_type == "QuantizeLinear"}

    before = graph_from_model(model, "int8", **options)
    with_role(block, "head")
    after = graph_from_model(model, "int8", **options)
    assert quantised(before.model) - quantised(after.model) == {"blocks.0.mlp.0"}


def test_a_node_without_a_role_is_an_error_that_names_it() -> None:
    model = small(MASK)

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    model.head_norm = Odd()
    with pytest.raises(ExportError, match=r"have no role.*\n  head_norm/Tanh: Odd declares no role for tanh"):
        exported(model)
