"""Attention for an image: the formulas on known weights, the tokens that a head reads, and models without a rollout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.models.layers.attention import heads_of, masked_attentions
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.reports.pages import written_page
from gmmvit_deploy.reports.pictures.attention_of_image import (
    ImageAttention,
    attention_of_bundle,
    attention_of_image,
    mean_attention_distance,
    rollout,
)
from gmmvit_deploy.reports.pictures.attention_report import attention_page
from gmmvit_deploy.reports.pictures.attention_weights import attention_record
from tests.browser import accessibility_problems
from tests.cli.terminal import done, gmmvit_here
from tests.conftest import GOLDEN, golden


def loaded(name: str) -> tuple[Model, torch.Tensor]:
    """Return a golden model in float64, and its first image."""
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model.eval().double(), torch.from_numpy(case.inputs[:1]).double()


def measured(name: str) -> ImageAttention:
    return attention_of(*loaded(name))


def attention_of(model: Model, image: torch.Tensor) -> ImageAttention:
    label_set = LabelSet(labels=tuple(map(str, range(model.spec.classes))))
    record, size = attention_record(model, image), (image.shape[2], image.shape[3])
    return attention_of_image(model, record, observed=model.observed_grids(), size=size, label_set=label_set)


# The formulas


def test_rollout_is_the_golden_rollout() -> None:
    with np.load(GOLDEN / "timm" / "attention_rollout.npz") as arrays:
        attentions, expected = arrays["attentions"], arrays["mean.0.0"]
    result = rollout(list(attentions))
    assert np.abs(result - expected).max() < 1e-14
    assert result.sum(axis=1) == pytest.approx(np.ones(len(result)), abs=1e-12)


def test_distance_of_uniform_and_of_local_weights() -> None:
    uniform, itself = np.full((4, 4), 0.25), np.eye(4)
    # from each patch of a 2×2 grid: itself, two neighbours, the diagonal
    assert mean_attention_distance(np.stack([uniform, itself]), (2, 2)) == pytest.approx([(2 + np.sqrt(2)) / 4, 0])
    assert mean_attention_distance(uniform[None], (2, 2), patch=(3, 4)) == pytest.approx([(3 + 4 + 5) / 4])
    assert mean_attention_distance(uniform[None], (1, 4)) == pytest.approx([1.25])
    windows = np.stack([uniform[None], itself[None]])
    assert mean_attention_distance(windows, (2, 2)) == pytest.approx([(2 + np.sqrt(2)) / 8])


def test_distance_leaves_the_prefix_out() -> None:
    weights = np.zeros((2, 5, 5))
    weights[:, :, 0] = 0.5
    weights[0, 1, 4] = 0.5  # the first patch attends to the patch on the diagonal; the other patches to no patch
    local, without = mean_attention_distance(weights, (2, 2), prefix=1)
    assert local == pytest.approx(np.sqrt(2))
    assert np.isnan(without)


# The weights of a model


def test_the_weights_are_softmax_of_the_scores() -> None:
    model, image = loaded("vit_plain")
    queries: list[torch.Tensor] = []
    attentions = [attention for _, attention in masked_attentions(model)]
    hooks = [a.qkv.register_forward_hook(lambda _m, _i, out: queries.append(out.detach())) for a in attentions]
    record = attention_record(model, image)
    for hook in hooks:
        hook.remove()
    assert [layer.layer for layer in record.layers] == [name for name, _ in attention_scores(model)]
    for layer, qkv, attention in zip(record.layers, queries, attentions, strict=True):
        query, key, _ = (heads_of(part, attention.heads) for part in qkv.chunk(3, dim=-1))
        expected = torch.softmax(query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5, dim=-1)
        assert np.abs(layer.weights - expected.numpy()).max() < 1e-14
    # The recording leaves the model as it was.
    assert all("normalised" not in scores.__dict__ for _, scores in attention_scores(model))


def test_distances_in_windows_and_along_rows() -> None:
    (first, *_) = measured("swin_gmm").distances
    side = golden("swin_gmm").inputs.shape[-1]
    assert first.sequences > 1
    # In windows of the stage, a step of the grid covers as many pixels as in the whole image.
    step = side / (first.grid[0] * first.sequences**0.5)
    assert first.pixels == pytest.approx([patches * step for patches in first.patches])
    assert all(0 < patches < first.grid[0] * 2**0.5 for patches in first.patches)
    rows = [layer for layer in measured("rmt_tiny_like").distances if layer.grid[0] == 1]
    assert rows
    assert {layer.layer.rpartition(".")[2] for layer in rows} == {"rows", "columns"}


# Pictures and reports


def first_image(bundle: Bundle, folder: Path) -> Path:
    path = folder / "image.png"
    path.write_bytes(bundle.golden_set().images[0])
    return path


@pytest.mark.nightly
@pytest.mark.integration
def test_an_accessibility_checker_has_no_complaint_about_a_report(tmp_path: Path) -> None:
    model, image = loaded("swin_gmm")
    path = tmp_path / "attention.html"
    pixels = np.zeros((32, 32, 3), np.uint8)
    page = attention_page(model, pixels, attention_of(model, image), bundle="bundle", image="image.png")
    written_page(page, path, force=False)
    assert accessibility_problems(path) == []


# The command


@pytest.mark.integration
def test_inspect_with_an_image(bundle: Bundle, tmp_path: Path) -> None:
    image = first_image(bundle, tmp_path)
    answer = done(
        gmmvit_here("inspect", bundle.path, "--image", image, "--json", "--report", tmp_path / "attention.html")
    )
    described = json.loads(answer.out)
    assert described["sha256"] == bundle.sha256
    assert described["no_rollout"] == ""
    assert np.sum(described["rollout"]["values"]) == pytest.approx(1)
    assert len(described["distances"][0]["pixels"]) == bundle.manifest.spec.first_heads
    assert (tmp_path / "attention.html").exists()
    # The attention is that of the preprocessed image, on which the bundle's logits were recorded.
    stored = bundle.golden_set()
    best, *others = described["predictions"]
    assert best["label"] == bundle.manifest.labels[int(stored.image_logits[0].argmax())]
    assert len(others) == 4
    model = load_checkpoint(golden("vit_gmm").path).model.eval().double()
    pixels = bundle.manifest.image.pixels_from_bytes(stored.images[0])
    record = attention_record(model, torch.from_numpy(bundle.manifest.image.tensor_from_pixels(pixels[None])).double())
    expected = rollout([layer.weights[0] for layer in record.layers]).mean(axis=0)
    assert np.ravel(described["rollout"]["values"]) == pytest.approx(expected, abs=1e-12)
    text = gmmvit_here("inspect", bundle.path, "--image", image, columns=200).out
    assert f"{best['probability']:.2%}  {best['label']}\n" in text
    assert "rollout: of the mean of the 64 patches" in text


@pytest.mark.integration
def test_images_and_bundles_that_cannot_be_used(
    bundle: Bundle, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    image = first_image(bundle, tmp_path)
    broken = tmp_path / "broken.png"
    broken.write_bytes(image.read_bytes()[:60])
    with pytest.raises(ImageError, match=r"broken.png: the image cannot be used"):
        attention_of_bundle(bundle, broken)
    with pytest.raises(ImageError, match="cannot be read"):
        attention_of_bundle(bundle, tmp_path)
    with pytest.raises(InputError, match="has no mean and std") as refused:
        attention_of_bundle(tensor_bundles["vit_gmm"], image)
    assert "with --mean and --std" in refused.value.hint
    for arguments, message in (
        ((bundle.path, "--image", tmp_path / "nowhere.png"), "nowhere.png: no such file"),
        ((bundle.path, "--image", image, "--set", "heads=3"), "an option for checkpoints is given"),
        ((bundle.path, "--image", image, "--report", tmp_path / "a.jpg"), "expected a path that ends in .html"),
    ):
        answer = gmmvit_here("inspect", *arguments)
        assert answer.status == 1
        assert message in answer.err
        assert "hint: " in answer.err
