"""The grids over which the attention scores of timm's models lie, and the attentions that are refused."""

import pytest
import timm
import torch
from torch import nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.layers.token_grids import placements, token_grids

pytestmark = pytest.mark.integration

SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}


def network(name: str, **model_args: object) -> nn.Module:
    try:
        with torch.device("meta"):  # only shapes matter here, so the weights are neither drawn nor stored
            return timm.create_model(name, **model_args)
    except (NotImplementedError, RuntimeError):
        return timm.create_model(name, **model_args)


def grids(model: nn.Module, height: int, width: int | None = None) -> set[tuple[object, ...]]:
    """Return (prefix, grid, heads, unit) of the placements."""
    return {
        (place.prefix, place.grid, place.heads, place.unit) for place in placements(model, (3, height, width or height))
    }


@pytest.mark.parametrize(
    ("name", "model_args", "prefix"),
    [
        ("vit_tiny_patch16_224", {}, 1),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}, 0),
        ("deit_tiny_distilled_patch16_224", {}, 2),
        ("vit_tiny_patch16_224", {"reg_tokens": 4, "qk_norm": True}, 5),
    ],
)
def test_vision_transformers_have_prefix_tokens_and_a_grid(name: str, model_args: dict, prefix: int) -> None:
    assert grids(network(name, **SMALL_VIT, **model_args), 32) == {(prefix, (4, 4), 3, (1, 1))}


@pytest.mark.parametrize(("name", "prefix"), [("pit_ti_224", 1), ("pit_ti_distilled_224", 2)])
def test_each_stage_of_pit_has_its_own_grid(name: str, prefix: int) -> None:
    expected = {(prefix, (side, side), heads, (1, 1)) for side, heads in ((27, 2), (14, 4), (7, 8))}
    assert grids(network(name, depth=(1, 1, 1)), 224) == expected


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "model_args", "shape", "expected"),
    [
        ("swin_tiny_patch4_window7_224", {"depths": (2, 1)}, (224, 224), {(0, (7, 7), heads) for heads in (3, 6)}),
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": (192, 224), "window_size": (6, 7), "depths": (1, 1)},
            (192, 224),
            {(0, (6, 7), heads) for heads in (3, 6)},
        ),
        ("beit_base_patch16_224", {"depth": 1}, (224, 224), {(1, (14, 14), 12)}),
        ("vit_small_patch16_dinov3", {"dynamic_img_size": False, "depth": 1}, (256, 256), {(5, (16, 16), 6)}),
        ("coatnet_nano_rw_224", {}, (224, 224), {(0, (14, 14), 4), (0, (14, 14), 8), (0, (7, 7), 8), (0, (7, 7), 16)}),
    ],
)
def test_windows_and_whole_feature_maps(name: str, model_args: dict, shape: tuple[int, int], expected: set) -> None:
    assert grids(network(name, **model_args), *shape) == {(*place, (1, 1)) for place in expected}


@pytest.mark.nightly
def test_grid_attention_of_maxvit_states_the_distance_of_its_tokens() -> None:
    model = network("maxvit_rmlp_pico_rw_256", depths=(1, 1), embed_dim=(32, 64))
    units = {place.module: place.unit for place in placements(model, (3, 256, 256))}
    assert units["stages.0.blocks.0.attn_block.attn"] == (1, 1)
    assert units["stages.0.blocks.0.attn_grid.attn"] == (8, 8)  # a map of 64 × 64, in a grid of 8 × 8
    assert units["stages.1.blocks.0.attn_grid.attn"] == (4, 4)
    assert grids(network("mobilevit_xxs"), 256) == {(0, (side, side), 4, (2, 2)) for side in (16, 8, 4)}


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "model_args", "reason"),
    [
        ("cait_xxs24_224", {"depth": 1}, "TalkingHeadAttn.*without the fused attention function"),
        ("levit_128s", {}, "Attention.*without the fused attention function.*AttentionDownsample"),
        ("xcit_nano_12_p16_224", {"depth": 1}, "XCA.*between channels"),
        ("xcit_medium_24_p16_224", {"img_size": 128, "depth": 1}, "XCA.*between channels"),  # 64 tokens, head dim 64
        ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, "got 3136 tokens for Q and 49 tokens for K"),
        ("nest_tiny", {}, "got 5 dimensions"),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True, "depth": 1}, "images of any size.*dynamic_img_size=False"),
        ("vit_tiny_patch16_224", {"patch_drop_rate": 0.5, "depth": 1}, "training drops patches"),
        ("resnet18", {}, "got no attention"),
    ],
)
def test_networks_without_a_grid_are_refused_with_the_reason(name: str, model_args: dict, reason: str) -> None:
    model = network(name, **model_args)
    with pytest.raises(SpecError, match=reason):
        placements(model, model.pretrained_cfg["input_size"] if "img_size" not in model_args else (3, 128, 128))


def test_a_network_for_images_of_any_size_has_a_grid_for_images_of_one_size() -> None:
    shape, grids = (3, 160, 160), []
    for any_size in (False, True):
        model = network("test_vit", dynamic_img_size=any_size)
        grids.append(token_grids(model, shape, only_this_shape=True).placements)
    assert grids[0] == grids[1] != ()


def test_multihead_attention_of_pytorch_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with pytest.raises(SpecError, match=r"self_attn \(MultiheadAttention\).*cannot replace the call"):
        placements(nn.Sequential(nn.Flatten(2), layer), (3, 4, 8))
