"""Golden checkpoints of every family: the report draws every step, and the attention of an image is drawn, or the
reason is stated.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from gmmvit_deploy.checkpoints.loading import describe_checkpoint, load_checkpoint
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.models.layers.attention import attentions_without_scores
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.locality import MaskedDiagonal
from gmmvit_deploy.reports.pictures.attention_of_image import attention_of_image
from gmmvit_deploy.reports.pictures.attention_report import attention_page
from gmmvit_deploy.reports.pictures.attention_weights import attention_record
from gmmvit_deploy.reports.pictures.drawings import drawings_of
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of
from gmmvit_deploy.reports.pictures.mask_report import page_of
from gmmvit_deploy.reports.pictures.step_numbers import CLOSED
from tests.golden_files import MANIFEST, golden, loaded
from tests.pages import require_readable_page

FOLDERS = ("deepvit", "rmt", "eanet", "spt_lsa", "vit_pytorch", "naive_vit")
NAMES = [name for name, entry in MANIFEST.items() if entry["folder"].name in FOLDERS]

WITH_MASKS_OR_OF_TIMM = (
    *("vit_gmm", "swin_gmm", "eanet_transformer", "pit_gmm", "t2t_gmm", "cait_gmm", "mnist_vit", "timm_vit"),
    *("timm_deit_distilled", "timm_deit_distilled_gmm", "timm_vit_registers", "torchvision_vit_conv_stem"),
    *("timm_swin", "timm_cait", "dino_linear"),
)

NO_ROLLOUT = {
    "timm_swin": r"divides the tokens into \d+ sequences",
    "timm_cait": "without the fused attention function",
    "dino_linear": "reads the class tokens of the last 3 blocks",
    "deepvit": r"changes the weights after softmax \(after.mixing",
    "rmt": r"rows divides the tokens into \d+ sequences",
    "eanet": "is no attention between tokens: it has no Q Kᵀ",
    "swin": r"divides the tokens into \d+ sequences, for example windows",
    "cait": r"changes the weights after softmax \(after.mixing\)",
    "pit": "the number of tokens changes",
    "t2t": "the number of tokens changes",
    "vp_deepvit": r"changes the weights after softmax \(after.mixing, after.norm\)",
}
"""Family, or the beginning of a name → the reason why the rollout is not defined."""

OF_FIRST = "token 0, before the patches"
READS = {
    **dict.fromkeys(("sl_vit", "lsa_vit_img64", "vp_vit", "vp_spt_lsa"), (1, OF_FIRST)),
    **dict.fromkeys(("mnist_vit", "timm_vit", "torchvision_vit_conv_stem"), (1, OF_FIRST)),
    **dict.fromkeys(("timm_deit_distilled", "timm_deit_distilled_gmm"), (2, "the mean of the tokens 0, 1")),
    **dict.fromkeys(("vit_gmm", "vp_simple_vit"), (0, "the mean of the 64 patches")),
    "timm_vit_registers": (4, "the mean of the 64 patches"),
}
"""Name of a checkpoint with a rollout → the number of prefix tokens, and the tokens that the head reads."""

COMPUTED = {"vp_simple_vit", "mnist_vit"}
"""Checkpoints without position embeddings, which the network computes from its sizes."""


@pytest.mark.first(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_report_draws_every_step(name: str) -> None:
    model = loaded(name).model
    assert not masks_of(model)
    page = page_of(loaded(name), [], describe_checkpoint(loaded(name)), drawings_of(model))
    tree = require_readable_page(page)
    alts = [image.attributes["alt"] for image in tree.all("img")]
    assert len(set(alts)) == len(alts)
    everything = " ".join(part.text for part in tree.all("main"))
    assert "not drawn" not in everything
    tables = " ".join(table.text for table in tree.all("table"))
    for _, scores in attention_scores(model):
        for step_name, step in scores.steps():
            if step.operation == "normalise" or step.matrix().dim() < 2 or tuple(step.matrix().shape[-2:]) == (1, 1):
                assert step_name in tables
            else:
                drawn = [alt for alt in alts if f" {step_name}, " in alt]
                heads = 1 if step.operation == "mix" or step.matrix().dim() < 3 else step.matrix().shape[-3]
                assert len(drawn) >= heads, (step_name, alts)
    for attention in attentions_without_scores(model):
        owner = attention.rpartition(".")[0]
        drawn = [alt for alt in alts if alt.startswith(f"{owner}.") and alt.endswith(": matrix of the memory")]
        assert len(drawn) == 2, (attention, alts)
    assert any("filters" in alt for alt in alts)
    tensors = [key for key, _ in (*model.named_parameters(), *model.named_buffers())]
    positions = [key for key in tensors if key == "positions" or key.endswith("position_embedding")]
    assert len(positions) == (golden(name).family != "rmt")
    assert [alt for alt in alts if "cosine similarity" in alt] == [
        f"{key}: cosine similarity of each position embedding to all others" for key in positions
    ]
    titles = [heading.text for heading in tree.all("h2")]
    assert ("Position embeddings" in titles) == bool(positions)
    assert ("not stored in the checkpoint" in everything) == (name in COMPUTED)
    assert len(set(titles)) == len(titles)


@pytest.mark.first(3)
@pytest.mark.parametrize("name", dict.fromkeys((*WITH_MASKS_OR_OF_TIMM, *NAMES)))
def test_the_attention_is_drawn_or_the_reason_is_stated(name: str) -> None:
    case = golden(name)
    model = load_checkpoint(case.path, case.hints).model.eval().double()
    image = torch.from_numpy(case.inputs[:1]).double()
    record = attention_record(model, image)
    with torch.no_grad():
        assert np.array_equal(record.logits, model(image)[0].numpy())
    size = (image.shape[2], image.shape[3])
    label_set = LabelSet(labels=tuple(map(str, range(model.spec.classes))))
    attention = attention_of_image(model, record, observed=model.observed_grids(), size=size, label_set=label_set)
    pixels, masks = np.zeros((*size, image.shape[1]), np.uint8), masks_of(model)
    page = attention_page(model, pixels, attention, bundle="bundle", image="<b>.png")
    tree = require_readable_page(page)
    titles = {heading.text for heading in tree.all("h2")}
    assert {"Answer", "Patch embedding"} <= titles or case.family == "timm"
    assert all(section.all("p", "img", "table", "dl", "li") for section in tree.all("section"))
    best = attention.predictions[0]
    assert f"The model classifies <b>.png as {best.label} ({best.probability:.1%})." in tree.all("main")[0].text
    drawn = [picture.attributes["alt"] for picture in tree.all("img")]
    assert len([alt for alt in drawn if alt.endswith(", over the image")]) == sum(len(mask.heads) for mask in masks)
    assert ("Mean attention distance" in titles) == bool(attention.distances)
    assert ("Masks over the image" in titles) == bool(masks)
    assert ("Not drawn" in titles) == bool(attention.no_rollout or attention.no_distances)
    json.dumps(attention.to_json(), allow_nan=False)
    if name in READS:
        assert attention.rollout is not None, attention.no_rollout
        prefix, reads = READS[name]
        assert attention.rollout.reads == reads
        assert attention.rollout.values.sum() + attention.rollout.prefix_share == pytest.approx(1, abs=1e-12)
        assert (attention.rollout.prefix_share > 0) == (prefix > 0)
        assert {(layer.prefix, layer.grid) for layer in attention.distances} == {
            (prefix, attention.rollout.values.shape)
        }
        assert "Image and attention rollout" in titles
    else:
        reason = next(why for key, why in NO_ROLLOUT.items() if key == case.family or name.startswith(key))
        assert attention.rollout is None
        assert re.search(reason, attention.no_rollout), attention.no_rollout
        assert attention.no_rollout in page.replace("&#39;", "'")
        assert "Image" in titles
    # Each attention has a distance, or a reason.
    described = {layer.layer for layer in attention.distances} | set(attention.no_distances)
    assert described >= {name for name, _ in attention_scores(model)} | set(attentions_without_scores(model))
    assert (case.family == "eanet" or name == "timm_cait") == (not attention.distances)
    assert all("1 query token attends to" in why for why in attention.no_distances.values() if case.family == "cait")
    for layer in attention.distances:
        assert all(value is not None and 0 < value < np.hypot(*size) for value in layer.pixels)
    # The recorded weights contain the steps: behind a masked diagonal, no token attends to itself.
    weights = {layer.layer: layer.weights for layer in record.layers}
    for where, scores in attention_scores(model):
        if any(step.matrix().diagonal().max() <= CLOSED for step in diagonals(scores)):
            assert not np.diagonal(weights[where], axis1=-2, axis2=-1).any()


def diagonals(scores: AttentionScores) -> list[MaskedDiagonal]:
    return [step for _, step in scores.steps_before() if isinstance(step, MaskedDiagonal)]
