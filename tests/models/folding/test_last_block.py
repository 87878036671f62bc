"""The last block of a ViT and a PiT computes only the tokens that are read: the same logits with less work."""

from __future__ import annotations

import pytest

from gmmvit_deploy.bench.roofline import work_of_graph
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.folding.last_block import narrow_last_block
from gmmvit_deploy.models.layers.blocks import Mlp
from gmmvit_deploy.models.layers.model import Model
from tests.conftest import golden


def trained(name: str) -> Model:
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model.requires_grad_(False)


@pytest.mark.rest
@pytest.mark.export
def test_the_graph_has_less_to_compute() -> None:
    model = trained("vit_gmm")
    narrowed = fold(model).model
    assert narrowed.blocks[-1].gives == "mean"
    whole = fold(model).model
    whole.blocks[-1].gives = "tokens"
    operations = [
        work_of_graph(onnx_from_model(form, preprocessing=None, max_batch=2), 1).operations
        for form in (narrowed, whole)
    ]
    spec = model.spec
    spared = 2 * (spec.tokens - 1) * spec.mlp_dim * spec.dim
    assert operations[1] - operations[0] == pytest.approx(spared, rel=0.01)


def test_a_mean_that_is_not_the_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mlp, "mean_over_tokens", lambda mlp, x: mlp(x[:, :1]))
    with pytest.raises(FoldError, match="narrow_last_block changed the mean of the output tokens by"):
        narrow_last_block(trained("vit_gmm"))
