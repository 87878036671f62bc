"""What a step is made of: the order of the images, their augmentation, stochastic depth, weight decay, the schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families import FAMILIES
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec, spec_to_json
from gmmvit_deploy.training._batches import Batches
from gmmvit_deploy.training._files import CHECKPOINT, save
from gmmvit_deploy.training.images import LabelledTensors, TrainingData
from gmmvit_deploy.training.networks import network_for_training, spec_of_preset, spec_of_timm
from gmmvit_deploy.training.recipe import RECIPES, Recipe, recipe_from
from gmmvit_deploy.training.trainer import Epoch, Step, Trainer

pytestmark = pytest.mark.integration

SIDES = {"deepvit": 32, "eanet": 32, "cait": 16, "vit": 8}
"""Family → image side for a quick step; 32 for the others."""
IMAGE = ImageSpec(height=8, width=8, channels=1, mean=(0.3,), std=(0.4,))


SMALL = ViTSpec(
    image_size=8, patch_size=4, classes=2, dim=16, depth=2, heads=2, head_dim=8, mlp_dim=16, class_token=False,
    mask=MaskSpec(kind="gmm", kernels=2), channels=1,
)  # fmt: skip


def few(image: ImageSpec, count: int = 4) -> TrainingData:
    pixels = np.random.default_rng(0).integers(0, 256, (count, image.height, image.width, 3), dtype=np.uint8)
    return TrainingData(
        train=ArrayImages("noise", pixels, np.arange(count) % 2), test=None, image=image, labels=("a", "b")
    )


def indices(batches: Batches) -> list[list[int]]:
    return [[index for index, _ in batch] for batch in batches]


def test_an_epoch_of_the_released_code_is_three_passes_and_repeats_no_image_in_a_batch() -> None:
    recipe = Recipe(epochs=2, batch=100)
    batches = Batches(100, recipe, seed=0)
    assert [Counter(batch) for batch in indices(batches)] == [Counter(range(100))] * 6
    assert len({tuple(batch) for batch in indices(batches)}) == 6  # each pass has an order of its own
    repeated = Batches(300, replace(recipe, repetition="batches", batch=30), seed=0)
    assert all(set(Counter(batch).values()) == {3} for batch in indices(repeated))
    once = Batches(300, replace(recipe, repetition="none", batch=30, epochs=1), seed=0)
    assert Counter(chain.from_iterable(indices(once))) == Counter(range(300))


def test_augmentation_depends_on_the_seed_of_the_image_only() -> None:
    digits = open_data("digits#train")
    images = LabelledTensors(digits, IMAGE, recipe_from("paper", "digits"))
    first, label = images[3, 11]
    torch.rand(5)
    again, _ = images[3, 11]
    assert torch.equal(first, again)
    assert label == digits.label(3)
    assert len({images[3, seed][0].numpy().tobytes() for seed in range(8)}) > 4
    plain, _ = LabelledTensors(digits, IMAGE)[3, 11]
    np.testing.assert_array_equal(plain, IMAGE.tensor_from_pixels(digits.pixels(3, IMAGE)))


def test_digits_are_not_mirrored_and_data_sets_have_their_policies() -> None:
    policies = [recipe_from("paper", kind).policy for kind in ("cifar100", "mnist", "folder")]
    assert policies == ["cifar10", "svhn", "imagenet"]
    assert not recipe_from("paper", "svhn").flip
    assert recipe_from("paper", "cifar10").flip
    assert recipe_from("light", "cifar10") == RECIPES["light"]


@pytest.mark.first(1)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.presets], ids=lambda family: family.name)
def test_a_preset_of_every_family_learns_from_a_step_and_is_loaded(family, tmp_path: Path) -> None:
    """Every block has stochastic depth, every parameter of the first block gets a gradient, and the checkpoint needs no
    option.
    """
    side = SIDES.get(family.name, 32)
    preset = min(family.presets, key=lambda name: sum(p.numel() for p in _meta(family, name, side).parameters()))
    spec = spec_of_preset(preset, classes=2, image_size=side, channels=3, mask="plain")
    image = ImageSpec(height=side, width=side, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    network = network_for_training(spec, drop_path=0.5)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    trainer = Trainer(network, few(image), Recipe(epochs=1, batch=4, repetition="none", warmup=0), seed=0)
    (step, _) = trainer.run()
    assert isinstance(step, Step)
    assert 0 < step.loss < 10
    changed = [name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])]
    assert len(changed) > 0.9 * len(before), sorted({*before} - {*changed})
    hooked = [module for module in network.modules() if module._forward_hooks]
    blocks = [module for module in network.modules() if {"attention", "mlp"} <= dict(module.named_children()).keys()]
    assert len(hooked) == 2 * (len(blocks) - 1) > 0  # the first block is never left out
    settings = {"network": spec_to_json(spec), "preprocessing": image.to_json(), "labels": ["a", "b"]}
    save(tmp_path, trainer, settings, log_bytes=0)
    loaded = load_checkpoint(tmp_path / CHECKPOINT)
    assert (loaded.spec, loaded.images.labels, loaded.images.mean) == (spec, ("a", "b"), image.mean)
    pixels = torch.rand(2, *image.tensor_shape)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(pixels), network.eval()(pixels), rtol=0, atol=1e-5)


def _meta(family, name: str, side: int):
    with torch.device("meta"):
        return family.build(family.presets[name](2, side, MaskSpec()))


PARTS = {
    "smoothing": 0.0,
    "mixing": 0.0,
    "policy": "none",
    "padding": 0,
    "flip": False,
    "erasing": 0.0,
    "weight_decay": 0.0,
    "rate": 2e-3,
    "min_rate": 1e-4,
    "repetition": "none",
    "drop_path": 0.0,
    "clip": 1e-3,
}
"""Part of a recipe → another value than that of the recipe below."""


def losses(recipe: Recipe) -> list[float]:
    torch.manual_seed(0)
    network = network_for_training(SMALL, drop_path=recipe.drop_path)
    return [step.loss for step in steps_of(Trainer(network, few(IMAGE, 8), recipe, seed=0))]


def steps_of(trainer: Trainer) -> list[Step]:
    return [record for record in trainer.run() if not isinstance(record, Epoch)]


@pytest.mark.nightly
def test_every_part_of_the_recipe_changes_the_losses() -> None:
    paper = replace(recipe_from("paper", "cifar10"), epochs=2, batch=4, mixing=0.9, erasing=0.9, drop_path=0.4)
    expected = losses(paper)
    assert losses(paper) == expected
    without_effect = [
        part for part, value in PARTS.items() if losses(replace(paper, **{part: value}))[: len(expected)] == expected
    ]
    assert without_effect == []


@pytest.mark.nightly
def test_masks_decay_as_in_the_released_code_or_not_at_all() -> None:
    spec = spec_of_timm("test_vit", {"patch_size": 4}, classes=2, image_size=8, channels=1, mask="gmm")
    for decays, expected in ((True, False), (False, True)):
        network = network_for_training(spec, drop_path=0.1)
        masks = {name: parameter.detach().clone() for name, parameter in network.named_parameters() if ".mask." in name}
        assert len(masks) == 12  # alpha and sigma of six blocks
        recipe = Recipe(
            epochs=1, batch=4, repetition="none", warmup=0, rate=1e-9, weight_decay=1e6, decays_masks=decays
        )
        list(Trainer(network, few(IMAGE), recipe, seed=0).run())
        kept = [
            torch.allclose(parameter, masks[name], atol=1e-6)
            for name, parameter in network.named_parameters()
            if name in masks
        ]
        assert kept == [expected] * 12


def test_rate_rises_and_then_falls_along_a_cosine() -> None:
    spec = spec_of_preset("vit_d6", classes=2, image_size=8, channels=1, mask="gmm")
    recipe = Recipe(epochs=10, batch=2, repetition="none", warmup=0.2, rate=1e-3)
    trainer = Trainer(network_for_training(spec, drop_path=0), few(IMAGE, 2), recipe, seed=0)
    rates = [step.rate for step in steps_of(trainer)]
    assert rates[:2] == pytest.approx([1e-6, 1e-6 + 0.5 * (1e-3 - 1e-6)])
    expected = [1e-6 + (1e-3 - 1e-6) * (1 + np.cos(np.pi * step / 8)) / 2 for step in range(8)]
    assert rates[2:] == pytest.approx(expected)
