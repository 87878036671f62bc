"""Every golden checkpoint of DeepViT, RMT, EANet, SPT and LSA, and vit-pytorch: the report draws every step, and the
attention of an image is drawn, or the reason is stated.
"""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest
import torch

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.models.layers.attention import attentions_without_scores
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.locality import MaskedDiagonal
from gmmvit_deploy.reports.pictures.attention_of_image import attention_of_image
from gmmvit_deploy.reports.pictures.attention_report import attention_page
from gmmvit_deploy.reports.pictures.attention_weights import attention_record
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of
from gmmvit_deploy.reports.pictures.mask_report import page_of
from gmmvit_deploy.reports.pictures.step_numbers import CLOSED
from tests.conftest import GOLDEN, MANIFEST, golden
from tests.pages import require_readable_page

NAMES = [
    name
    for name, entry in MANIFEST.items()
    if entry["folder"] in [GOLDEN / folder for folder in ("deepvit", "rmt", "eanet", "spt_lsa", "vit_pytorch")]
]

NO_ROLLOUT = {
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

READS = {
    "sl_vit": "token 0, before the patches",
    "lsa_vit_img64": "token 0, before the patches",
    "vp_vit": "token 0, before the patches",
    "vp_simple_vit": "the mean of the 64 patches",
    "vp_spt_lsa": "token 0, before the patches",
}
"""Name of a checkpoint with a rollout → the tokens that the head reads."""

COMPUTED = {"vp_simple_vit"}
"""Checkpoints without position embeddings, which the network computes from its sizes."""


@functools.cache
def loaded(name: str) -> LoadedCheckpoint:
    case = golden(name)
    return load_checkpoint(case.path, case.hints)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_report_draws_every_step(name: str) -> None:
    model = loaded(name).model
    assert not masks_of(model)
    tree = require_readable_page(page_of(loaded(name), []))
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
    positions = [key for key in tensors if key.rpartition(".")[2] == "position_embedding"]
    assert len(positions) == (golden(name).family != "rmt")
    assert [alt for alt in alts if "cosine similarity" in alt] == [
        f"{key}: cosine similarity of each position embedding to all others" for key in positions
    ]
    titles = [heading.text for heading in tree.all("h2")]
    assert ("Position embeddings" in titles) == bool(positions)
    assert ("not stored in the checkpoint" in everything) == (name in COMPUTED)
    assert len(set(titles)) == len(titles)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", NAMES)
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
    page = attention_page(model, np.zeros((*size, 3), np.uint8), attention, bundle="bundle", image="photo.png")
    titles = {heading.text for heading in require_readable_page(page).all("h2")}
    assert ("Mean attention distance" in titles) == bool(attention.distances)
    assert ("Masks over the image" in titles) == bool(masks_of(model))
    assert ("Not drawn" in titles) == bool(attention.no_rollout or attention.no_distances)
    json.dumps(attention.to_json(), allow_nan=False)
    if name in READS:
        assert attention.rollout is not None, attention.no_rollout
        assert attention.rollout.reads == READS[name]
        assert attention.rollout.values.sum() + attention.rollout.prefix_share == pytest.approx(1, abs=1e-12)
        assert "Image and attention rollout" in titles
    else:
        reason = next(why for key, why in NO_ROLLOUT.items() if key == case.family or name.startswith(key))
        assert attention.rollout is None
        assert re.search(reason, attention.no_rollout), attention.no_rollout
        assert attention.no_rollout in page
        assert "Image" in titles
    # Each attention has a distance, or a reason.
    described = {layer.layer for layer in attention.distances} | set(attention.no_distances)
    assert described >= {name for name, _ in attention_scores(model)} | set(attentions_without_scores(model))
    assert (case.family == "eanet") == (not attention.distances)
    for layer in attention.distances:
        assert all(value is not None and 0 < value < np.hypot(*size) for value in layer.pixels)
    # The recorded weights contain the steps: behind a masked diagonal, no token attends to itself.
    weights = {layer.layer: layer.weights for layer in record.layers}
    for where, scores in attention_scores(model):
        if any(step.matrix().diagonal().max() <= CLOSED for step in diagonals(scores)):
            assert not np.diagonal(weights[where], axis1=-2, axis2=-1).any()


def diagonals(scores: AttentionScores) -> list[MaskedDiagonal]:
    return [step for _, step in scores.steps_before() if isinstance(step, MaskedDiagonal)]
