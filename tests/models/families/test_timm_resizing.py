"""Resize models of timm to another image size, and compare the logits with networks that other code resized."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from gmmvit_deploy.checkpoints._model_folder import read_checkpoint
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.timm.resizing import resized_model
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.golden_files import MANIFEST, golden

pytestmark = pytest.mark.integration

timm = pytest.importorskip("timm")

SIZE = 48
EXACT = {"rtol": 0.0, "atol": 1e-12}  # float64: both sides copy the same float32 tensors


@functools.cache
def loaded(name: str, **more: Any) -> LoadedCheckpoint:
    case = golden(name)
    return load_checkpoint(case.path, replace(case.hints, **more))


def tensors_of(name: str) -> dict[str, Tensor]:
    return dict(read_checkpoint(golden(name).path, golden(name).hints.weights).tensors)


def built(name: str, size: int = SIZE, **more: Any) -> Any:
    """The network that timm builds at the new size."""
    build = MANIFEST[name]["build"]
    return timm.create_model(build["architecture"], **{**build["model_args"], "img_size": size, **more})


def images(size: int = SIZE) -> Tensor:
    return torch.randn(3, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, size: int = SIZE) -> Tensor:
    with torch.no_grad():
        out: Tensor = copy.deepcopy(model).double().eval()(images(size))
    return out


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "size", "prefix", "also"),
    [
        ("timm_vit", 48, 1, {}),
        ("timm_vit", 24, 1, {}),
        ("timm_deit_distilled", 48, 2, {"interpolation": "timm"}),
        ("timm_vit_registers", 48, 0, {}),
        ("timm_vit_qk_norm", 48, 1, {"interpolation": "timm"}),
        ("timm_cait", 48, 0, {"interpolation": "timm"}),
    ],
)
def test_equals_timm_with_positions_of_timm(name: str, size: int, prefix: int, also: dict[str, Any]) -> None:
    from timm.layers import resample_abs_pos_embed

    network, tensors = built(name, size), tensors_of(name)
    grid = list(network.patch_embed.grid_size)
    tensors["pos_embed"] = resample_abs_pos_embed(tensors["pos_embed"], grid, num_prefix_tokens=prefix)
    network.load_state_dict(tensors, strict=True)
    ours = loaded(name, resize_to=size, **also)
    torch.testing.assert_close(logits(ours.model, size), logits(network, size), **EXACT)
    assert isinstance(ours.spec, TimmSpec)
    assert (ours.spec.image_shape, ours.spec.resized_from) == ((size, size), (32, 32))
    assert ours.spec.interpolation == "timm"


@pytest.mark.parametrize(("name", "code"), [("timm_deit_distilled", "deit"), ("dino_linear", "dino")])
def test_the_default_is_the_algorithm_of_the_code_that_wrote_the_file(name: str, code: str) -> None:
    """`tests/models/layers/test_positions.py` compares the algorithms with embeddings that the codes computed."""
    assert loaded(name, resize_to=SIZE).spec.interpolation == code  # type: ignore[attr-defined]


def test_the_convolution_stem_equals_torchvision() -> None:
    models = pytest.importorskip("torchvision").models.vision_transformer
    build = dict(MANIFEST["torchvision_vit_conv_stem"]["build"])
    stem = [models.ConvStemConfig(**config) for config in build.pop("conv_stem_configs")]
    network = models.VisionTransformer(**{**build, "image_size": SIZE}, conv_stem_configs=stem)
    tensors = models.interpolate_embeddings(SIZE, build["patch_size"], tensors_of("torchvision_vit_conv_stem"))
    network.load_state_dict(tensors, strict=True)
    ours = loaded("torchvision_vit_conv_stem", resize_to=SIZE)
    assert ours.spec.interpolation == "torchvision"  # type: ignore[attr-defined]
    torch.testing.assert_close(logits(ours.model), logits(network), **EXACT)


def saved(folder: Path, network: nn.Module) -> Path:
    """Write the state dict of a network, with positions and tables of unit variance; timm begins with small numbers."""
    with torch.no_grad():
        torch.manual_seed(0)
        for name, parameter in network.named_parameters():
            if name.endswith(("pos_embed", "relative_position_bias_table")):
                parameter.normal_()
    path = folder / "weights.pth"
    torch.save(network.state_dict(), path)
    return path


SMALL_VIT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2, "num_classes": 5}
SMALL_SWIN = {"patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "num_classes": 5}
SMALL: Mapping[str, tuple[str, dict[str, Any], int, int]] = {
    "beit": ("beit_base_patch16_224", SMALL_VIT, 32, 48),
    "beit with positions": ("beit_base_patch16_224", SMALL_VIT | {"use_abs_pos_emb": True}, 32, 48),
    "swin": ("swin_tiny_patch4_window7_224", SMALL_SWIN | {"window_size": 4}, 32, 48),
    "swin, the last window grows": ("swin_tiny_patch4_window7_224", SMALL_SWIN | {"window_size": 8}, 16, 32),
    "relpos": ("vit_relpos_small_patch16_224", SMALL_VIT | {"rel_pos_dim": None, "rel_pos_type": "bias"}, 32, 48),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("case", SMALL)
def test_tables_equal_those_of_timms_loading(case: str, tmp_path: Path) -> None:
    """For Swin and BEiT, timm resizes tables when it loads a file; for relpos, the test calls timm's function."""
    from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
    from timm.models import beit, swin_transformer

    architecture, model_args, old, new = SMALL[case]
    path = saved(tmp_path, timm.create_model(architecture, **model_args, img_size=old))
    network = timm.create_model(architecture, **model_args, img_size=new)
    tensors = torch.load(path, weights_only=True)
    if case == "relpos":
        for name in [key for key in tensors if key.endswith("relative_position_bias_table")]:
            tensors[name] = resize_rel_pos_bias_table(
                tensors[name], new_window_size=(6, 6), new_bias_shape=network.state_dict()[name].shape
            )
    else:
        module = beit if case.startswith("beit") else swin_transformer
        tensors = module.checkpoint_filter_fn(tensors, network)
    network.load_state_dict(tensors, strict=True)
    ours = load_checkpoint(
        path, LoadHints(model=architecture, model_args=model_args, image_size=old, resize_to=new, interpolation="timm")
    )
    torch.testing.assert_close(logits(ours.model, new), logits(network, new), **EXACT)
    assert ours.spec.interpolation == ("timm" if "positions" in case else None)  # type: ignore[attr-defined]


@pytest.mark.nightly
def test_positions_of_a_pit_lie_over_rows_and_columns(tmp_path: Path) -> None:
    args = {"base_dims": [8, 8, 8], "depth": [1, 1, 1], "heads": [1, 2, 4], "num_classes": 5}
    path = saved(tmp_path, timm.create_model("pit_ti_224", **args, img_size=64))
    hints = LoadHints(model="pit_ti_224", model_args=args, image_size=64, resize_to=96, interpolation="timm")
    network, tensors = timm.create_model("pit_ti_224", **args, img_size=96), torch.load(path, weights_only=True)
    shape = network.pos_embed.shape
    assert shape[2:] != tensors["pos_embed"].shape[2:]
    tensors["pos_embed"] = nn.functional.interpolate(
        tensors["pos_embed"], size=shape[2:], mode="bicubic", antialias=True
    )
    network.load_state_dict(tensors, strict=True)
    torch.testing.assert_close(logits(load_checkpoint(path, hints).model, 96), logits(network, 96), **EXACT)


def test_resizes_to_images_that_are_not_square() -> None:
    from timm.layers import resample_abs_pos_embed

    model = resized_model(loaded("timm_vit").model, (24, 40), "timm")  # type: ignore[arg-type]
    network, tensors = built("timm_vit", (24, 40)), tensors_of("timm_vit")  # type: ignore[arg-type]
    tensors["pos_embed"] = resample_abs_pos_embed(tensors["pos_embed"], [6, 10])
    network.load_state_dict(tensors, strict=True)
    batch = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(model).double()(batch), network.double().eval()(batch), **EXACT)
    # The same number of patches: 6 × 10 and 10 × 6. The positions belong to the grid, not to the number.
    turned = resized_model(model, (40, 24), "timm")
    assert not turned.network.pos_embed.equal(model.network.pos_embed)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gmm", "decay"])
def test_masks_without_a_size_are_computed_again(kind: Literal["gmm", "decay"], tmp_path: Path) -> None:
    from timm.layers import resample_abs_pos_embed

    from gmmvit_deploy.timm import create

    torch.manual_seed(0)
    name, path = "vit_tiny_patch16_224", tmp_path / "masked.pth"
    torch.save(create(name, mask=kind, kernels=3, **SMALL_VIT, img_size=32).state_dict(), path)
    sizes = {"model": name, "model_args": SMALL_VIT, "image_size": 32, "resize_to": 48}
    ours = load_checkpoint(path, LoadHints(**sizes, closed_form=True if kind == "gmm" else None, interpolation="timm"))
    network = create(name, mask=kind, kernels=3, **SMALL_VIT, img_size=48)
    tensors = torch.load(path, weights_only=True)
    tensors["pos_embed"] = resample_abs_pos_embed(tensors["pos_embed"], [6, 6])
    network.load_state_dict(tensors, strict=True)
    torch.testing.assert_close(logits(ours.model), logits(network), rtol=0, atol=1e-11)


def test_resizes_the_weights_of_a_bundle(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes_from_model(loaded("timm_vit").model))
    with pytest.raises(CheckpointError, match="does not show which code"):
        load_checkpoint(path, LoadHints(resize_to=SIZE))
    ours = load_checkpoint(path, LoadHints(resize_to=SIZE, interpolation="timm"))
    assert logits(ours.model).equal(logits(loaded("timm_vit", resize_to=SIZE).model))
