"""Sharing exports among tests changes no graph and hides no change of a model."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.families import model_from_spec
from gmmvit_deploy.families.vit.spec import ViTSpec
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.images import ImageSpec
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.specs import MaskSpec
from tests.shared_exports import key_of, shared_exports
from tests.timm_graphs import timm_model


@pytest.fixture
def model() -> Model:
    spec = ViTSpec(
        image_size=8,
        patch_size=4,
        classes=3,
        dim=16,
        depth=1,
        heads=1,
        head_dim=16,
        mlp_dim=32,
        class_token=False,
        mask=MaskSpec(kind="gmm", kernels=2),
    )
    return fold(model_from_spec(spec).eval()).model


@pytest.mark.export
def test_a_shared_graph_is_the_exported_graph(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"preprocessing": None, "max_batch": 4}
    own = onnx_from_model(model, **options).SerializeToString()  # a test with monkeypatch exports by itself
    with shared_exports():
        first, again = (onnx_from_model(copy.deepcopy(model), **options).SerializeToString() for _ in range(2))
    assert first == own
    assert again == own


@pytest.mark.export
def test_a_shared_graph_in_which_names_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer ``mean`` of the pixel normalisation has the name of the result of ReduceMean (resnet's pooling)."""
    foreign = fold(timm_model("resnet")).model
    pixels = ImageSpec(height=64, width=64, channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
    assert key_of(foreign, (torch.zeros(1),), {}) is not None
    own = onnx_from_model(foreign, preprocessing=pixels, max_batch=4)
    with shared_exports():
        first = onnx_from_model(copy.deepcopy(foreign), preprocessing=pixels, max_batch=4)
    onnx.checker.check_model(own, full_check=True)
    # The numbers in the names of constants that the optimisation makes can differ.
    assert [(node.op_type, node.name) for node in first.graph.node] == [
        (node.op_type, node.name) for node in own.graph.node
    ]
    assert len(first.graph.initializer) == len(own.graph.initializer)
    for shared, exported in zip(first.graph.initializer, own.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(shared), numpy_helper.to_array(exported))


def test_every_change_of_a_model_is_another_key(model: Model) -> None:
    example, options = (torch.zeros(2, 3, 8, 8),), {"opset_version": 20}
    key = key_of(model, example, options)
    assert key == key_of(copy.deepcopy(model), example, dict(options))
    other_weight, other_epsilon = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        next(other_weight.parameters()).flatten()[0] += 1
    next(module for module in other_epsilon.modules() if isinstance(module, torch.nn.LayerNorm)).eps = 1e-3
    keys = {
        key,
        key_of(other_weight, example, options),
        key_of(other_epsilon, example, options),
        key_of(model, (torch.zeros(3, 3, 8, 8),), options),
        key_of(model, example, {"opset_version": 21}),
    }
    assert None not in keys
    assert len(keys) == 5


def test_a_class_that_cannot_be_pickled_is_not_shared() -> None:
    class Local(torch.nn.Module):
        pass

    assert key_of(Local(), (torch.zeros(1),), {}) is None
