from __future__ import annotations

import pytest
import torch
from torch import nn

from gmmvit_deploy.bench.roofline import work_of_graph
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.models.folding.fold import fold, narrow_last_block
from gmmvit_deploy.models.folding.passes import fold_biases
from gmmvit_deploy.models.layers.blocks import Mlp
from gmmvit_deploy.models.layers.patches import Unfold, UnfoldConvolution
from gmmvit_deploy.models.scores.attention import attention_scores
from tests.golden_files import trained


def test_swin_biases_equal_the_trained_biases_bit_for_bit() -> None:
    model = trained("swin_gmm_whole_grid")
    result = fold(model)
    shapes = []
    for (_, scores), record in zip(attention_scores(model), result.biases, strict=True):
        assert record.constant.equal(scores.before.bias.matrix())
        shapes.append(tuple(record.constant.shape))
    # shifted blocks have a bias for each window; the last stage has a single window, which is not shifted
    assert shapes == [(3, 16, 16), (16, 3, 16, 16), (6, 16, 16), (4, 6, 16, 16), (12, 16, 16), (12, 16, 16)]


def test_a_bias_that_is_not_finite_is_refused() -> None:
    model = trained("swin_plain")
    next(attention_scores(model))[1].before.bias.table[0, 0] = float("inf")
    with pytest.raises(FoldError, match="the bias has NaN or infinite"):
        fold_biases(model)


@pytest.mark.parametrize("side", [2, 3, 8, 32])
def test_unfold_as_convolution_is_exact(side: int) -> None:
    lattice = 1e3 * torch.randn(2, 5, side, side)
    expected = nn.functional.unfold(lattice, 3, stride=2, padding=1).transpose(1, 2)
    assert UnfoldConvolution(Unfold(3, stride=2, padding=1), 5)(lattice).equal(expected)


@pytest.mark.nightly
@pytest.mark.integration
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
