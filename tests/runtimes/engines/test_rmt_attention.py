"""Engines get the attentions of RMT, along rows and along columns, in the form that fused kernels take."""

from __future__ import annotations

from dataclasses import replace

import torch

from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.folding.fold import engine_passes, fold, fold_for_engines
from tests.models.families.small_specs import small_spec


def test_engines_get_attention_of_four_dimensions() -> None:
    torch.manual_seed(0)
    spec = replace(small_spec("rmt", "decay"), release="2024", projection_dim=40)
    folded = fold(model_from_spec(spec).eval())
    joined = fold_for_engines(folded, engine_passes(spec))
    assert joined.passes["join_rows"] == ("stages.0.blocks.0.attention",)
    shapes: list[int] = []
    for module in joined.model.modules():
        if hasattr(module, "scores"):
            module.scores.register_forward_hook(lambda module, given, output: shapes.append(output.dim()))
    images = torch.randn(3, 3, 24, 24)
    with torch.inference_mode():
        assert joined.model(images).allclose(folded.model(images), atol=1e-6)
    assert shapes == [4, 4, 4]
