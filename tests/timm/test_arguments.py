"""What train.py and the options state reaches timm: tags, epsilon of BatchNorm, sizes, preprocessing; and the proof."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_data_config
from torch import nn

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.errors import CheckpointError, GmmvitError, InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions
from gmmvit_deploy.models.families.timm.model import TimmModel
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import KnownImages

pytestmark = pytest.mark.integration

TINY = {"embed_dim": 24, "depth": 1, "num_heads": 2}


def train_file(folder: Path, name: str, *, kwargs: dict[str, Any], seed: int = 0, **args: Any) -> tuple[Path, Any]:
    """Write a checkpoint as timm's train.py does; return the file and timm's own model, in float64."""
    torch.manual_seed(seed)
    stated = {name: args[name] for name in ("bn_eps", "in_chans") if args.get(name) is not None}
    model = timm.create_model(name, pretrained=False, num_classes=5, **{**kwargs, **stated}).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    options = {"model": name, "crop_pct": None, "mean": None, "std": None, "interpolation": "", "model_kwargs": kwargs}
    namespace = Namespace(**{"gp": None, "img_size": None, "input_size": None, "in_chans": None, **options, **args})
    path = folder / "last.pth.tar"
    arch = name.partition(".")[0]
    torch.save({"arch": arch, "args": namespace, "state_dict": model.state_dict()}, path)
    return path, model.double()


def require_timms_logits(loaded: LoadedCheckpoint, model: nn.Module) -> None:
    images = torch.randn(2, loaded.spec.channels, *loaded.spec.image_shape, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model.double()(images), model(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["test_byobnet", "halonet26t", "vit_tiny_patch16_224"])
def test_without_img_size_train_py_takes_the_size_of_the_architecture(tmp_path: Path, name: str) -> None:
    path, model = train_file(tmp_path, name, kwargs=TINY if name.startswith("vit") else {})
    loaded = load_checkpoint(path)
    assert loaded.spec.image_shape == model.pretrained_cfg["input_size"][1:]
    assert loaded.taken_from == {"image_size": f"timm's default for {name}"}
    stated, _ = train_file(tmp_path, "test_byobnet", kwargs={}, img_size=96)
    assert load_checkpoint(stated).taken_from == {"image_size": "img_size of args"}


@pytest.mark.parametrize("of_args", [Namespace, dict])
@pytest.mark.parametrize("changed", [{"act_layer": nn.ReLU}, {"norm_layer": functools.partial(nn.LayerNorm, eps=0.1)}])
def test_an_argument_that_is_no_plain_value_is_refused_by_name(tmp_path: Path, changed: Any, of_args: Any) -> None:
    path, _ = train_file(tmp_path, "vit_tiny_patch16_224", kwargs={**TINY, **changed})
    content = torch.load(path, weights_only=False)
    torch.save({**content, "args": of_args(**vars(content["args"]))}, path)
    with pytest.raises(CheckpointError, match=rf"the option model_kwargs\.{next(iter(changed))} as "):
        load_checkpoint(path)


def test_a_typed_argument_replaces_one_that_is_no_plain_value(tmp_path: Path) -> None:
    path, model = train_file(tmp_path, "vit_tiny_patch16_224", kwargs={**TINY, "img_size": 32, "act_layer": nn.ReLU})
    loaded = load_checkpoint(path, LoadHints(model_args={"act_layer": "relu"}))
    require_timms_logits(loaded, model)
    with pytest.raises(CheckpointError, match=r"the option model_kwargs\.act_layer as torch\.nn"):
        load_checkpoint(path, LoadHints(model_args={"embed_dim": 24}))


def dinov2_of_224_pixels(folder: Path) -> Path:
    """Write a state dict of an architecture whose usual images have 518 pixels."""
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=5, img_size=224, **TINY)
    torch.save(model.state_dict(), folder / "bare.pth")
    return folder / "bare.pth"


def test_the_stored_positions_show_the_size(tmp_path: Path) -> None:
    loaded = load_checkpoint(
        dinov2_of_224_pixels(tmp_path), LoadHints(model="vit_small_patch14_dinov2", model_args=TINY)
    )
    assert loaded.spec.image_shape == (224, 224)
    assert "patch 14; assumed to be square, else type --model-args" in loaded.taken_from["image_size"]


def test_each_value_names_its_origin(tmp_path: Path) -> None:
    path, _ = train_file(tmp_path, "test_vit", kwargs={}, mean=(0.1, 0.2, 0.3), interpolation="bilinear")
    known = load_checkpoint(path).images
    typed = ExportOptions(crop_pct=1.0)
    assert typed.completed(known, default=None).origins(known, typed) == {
        "mean": "mean of args",
        "std": "timm's default for test_vit",
        "resize": "interpolation of args",
        "labels": "the class indices; --labels gives names",
    }
    typed = ExportOptions(mean=(0.5,), std=(0.5,), labels=("a",))
    nothing = KnownImages()
    assert typed.completed(nothing).origins(nothing, typed, family="vit") == {"resize": "the default of the family vit"}


@pytest.mark.parametrize(
    "name",
    [
        *("vit_base_patch16_224.dino", "test_vit.r160_in1k", "test_vit"),
        *("vit_tiny_patch16_224_in21k", "vit_small_patch8_224_dino"),  # timm has changed these names
    ],
)
def test_the_tag_decides_the_preprocessing(tmp_path: Path, name: str) -> None:
    size = {} if name.startswith("test") else {"img_size": 32}
    path, model = train_file(tmp_path, name, kwargs={**TINY, **size})
    loaded = load_checkpoint(path, LoadHints(model=name))
    images, expected = loaded.images, resolve_data_config({}, model=model)
    assert (images.mean, images.std) == (tuple(expected["mean"]), tuple(expected["std"]))
    assert images.crop_pct == expected["crop_pct"]
    assert images.resize == f"{expected['crop_mode']}-{expected['interpolation']}"
    present = timm.models.get_deprecated_models().get(name)
    assert images.origins["mean"] == f"timm's default for {name}" + (f", now {present}" if present else "")
    assert isinstance(loaded.spec, TimmSpec)
    assert loaded.spec.architecture == (present or name).partition(".")[0]


@pytest.mark.parametrize(
    ("name", "kwargs", "args"),
    [
        ("test_efficientnet", {}, {"bn_eps": 0.1}),
        # The first convolution of TResNet has 16 inputs for each channel of the image.
        ("tresnet_m", {"layers": [1, 1, 1, 1], "width_factor": 0.25}, {"img_size": 64, "in_chans": 1}),
        ("tresnet_m", {"layers": [1, 1, 1, 1], "width_factor": 0.25}, {"img_size": 64, "in_chans": 3}),
        ("vit_tiny_patch16_224", {**TINY, "img_size": 32, "dynamic_img_size": True}, {"img_size": 48}),
    ],
    ids=["epsilon of BatchNorm", "one channel", "three channels", "a size for each image"],
)
def test_what_train_py_states_gives_the_logits_of_timm(
    tmp_path: Path, name: str, kwargs: dict[str, Any], args: dict[str, Any]
) -> None:
    path, model = train_file(tmp_path, name, kwargs=kwargs, **args)
    loaded = load_checkpoint(path)
    assert loaded.spec.channels == args.get("in_chans", 3)
    assert loaded.spec.image_size == args.get("img_size", loaded.spec.image_size)
    require_timms_logits(loaded, model)


@pytest.mark.parametrize(
    ("typed", "closest"),
    [
        ("vit_base_patch16", "vit_base_patch16_"),  # fine-tuning with MAE's code
        ("vit_tinny_patch16_224", "vit_tiny_patch16_224, "),
        ("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", "vit_tiny_patch16_224.augreg_in21k"),
        ("hf_hub:someone/pets", "with the name that config.json of someone/pets has under architecture"),
    ],
)
def test_the_closest_name_of_timm_is_suggested(tmp_path: Path, typed: str, closest: str) -> None:
    path, _ = train_file(tmp_path, "vit_tiny_patch16_224", kwargs={**TINY, "img_size": 32})
    with pytest.raises(GmmvitError) as caught:
        load_checkpoint(path, LoadHints(model=typed))
    suggested = caught.value.hint.partition("such as ")[2] or caught.value.hint.partition("--model ")[2]
    assert suggested.startswith(closest)


def test_one_channel_averages_the_normalisation(tmp_path: Path) -> None:
    path, model = train_file(
        tmp_path, "vit_tiny_patch16_224", kwargs={**TINY, "img_size": 32, "in_chans": 1}, in_chans=1
    )
    images = load_checkpoint(path, LoadHints()).images
    mean = resolve_data_config({}, model=model)["mean"]
    assert images.mean == pytest.approx([sum(mean) / 3])
    assert len(images.std or ()) == 1


def test_features_are_no_logits(tmp_path: Path) -> None:
    path, _ = train_file(tmp_path, "vit_tiny_patch16_224", kwargs={**TINY, "img_size": 32})
    with pytest.raises(GmmvitError, match=r"expected logits of shape \(2, 5\) for two images, got \(2, 5, 5\)"):
        load_checkpoint(path, LoadHints(model_args={"global_pool": ""}))


def test_a_model_that_differs_from_timms_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = train_file(tmp_path, "vit_tiny_patch16_224", kwargs={**TINY, "img_size": 32})
    answer_calls = TimmModel.answer_calls

    def with_a_mistake(model: TimmModel, masked: Any) -> None:
        answer_calls(model, masked)
        model.get_submodule("network.norm").eps = 1e-5  # type: ignore[assignment]  # the epsilon of a LayerNorm

    monkeypatch.setattr(TimmModel, "answer_calls", with_a_mistake)
    with pytest.raises(GmmvitError, match=r"differ by .* from the logits of timm's own model"):
        load_checkpoint(path, LoadHints())


def test_the_crop_of_the_file_stays_with_another_filter() -> None:
    known = KnownImages(mean=(0.5,), std=(0.5,), resize="center-bicubic", crop_pct=0.9, labels=("a",))
    assert ExportOptions(resize="center-bilinear").completed(known).crop_pct == 0.9
    assert ExportOptions(resize="stretch-bilinear").completed(known).crop_pct is None
    assert ExportOptions(resize="center-bicubic", crop_pct=1.0).completed(known).crop_pct == 1.0


def test_crop_pct_of_the_file_can_be_replaced() -> None:
    known = KnownImages(mean=(0.5,), std=(0.5,), resize="center-bicubic", crop_pct=1.14, labels=("a",))
    with pytest.raises(InputError, match=r"the checkpoint states crop_pct 1\.14") as caught:
        ExportOptions().completed(known)
    assert "--crop-pct 1" in caught.value.hint
    assert ExportOptions(crop_pct=1.0).completed(known).crop_pct == 1.0


def test_preprocessing_of_a_state_dict_is_asked_for(tmp_path: Path) -> None:
    torch.save(timm.create_model("test_vit2", num_classes=5).state_dict(), tmp_path / "bare.pth")
    known = load_checkpoint(tmp_path / "bare.pth", LoadHints(model="test_vit2")).images
    numbers, rule = "--mean 0.5,0.5,0.5 --std 0.5,0.5,0.5", "--resize center-bicubic --crop-pct 0.95"
    with pytest.raises(InputError, match="the mean and the std and the resize rule") as caught:
        ExportOptions().completed(known, default=None)
    assert f"had timm's values for this name, add {numbers} {rule}; otherwise add " in caught.value.hint
    stated: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "labels": tuple("abcde")}
    with pytest.raises(InputError, match="does not state the resize rule") as caught:
        ExportOptions(**stated).completed(known, default=None)
    assert f"add {rule}; otherwise add --resize METHOD" in caught.value.hint
    assert ExportOptions(**stated, resize="center-bicubic").completed(known, default=None)
    assert ExportOptions(input_kind="tensor").completed(known, default=None)
    assert ExportOptions(mean=(0.5,), std=(0.5,), resize="center-bicubic").completed(known, default=None)
