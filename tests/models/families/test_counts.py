"""Tables of the paper and of its released code, reproduced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gmmvit_deploy.models.families import PRESETS, model_from_spec, preset_spec
from gmmvit_deploy.models.families.counting import multiply_accumulates, trainable_parameters
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec

PLAIN, ELM, GMM = MaskSpec(), MaskSpec(kind="elm"), MaskSpec(kind="gmm", kernels=5)


def shared(kernels: int) -> MaskSpec:
    return MaskSpec(kind="gmm", kernels=kernels, shared=True)


def named(name: str, mask: MaskSpec) -> ModelSpec:
    return preset_spec(name, classes=10, image_size=32, mask=mask)


def bare(name: str) -> ModelSpec:
    """A plain ViT without class token, as Table 3 counts it."""
    return replace(named(name, PLAIN), class_token=False)


def heat(mask: MaskSpec) -> ModelSpec:
    return replace(PRESETS["vit-heat"](200, 64, mask), class_token=False)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        pytest.param(bare("vit_d6"), 3_091_798, id="Table 3: d6"),
        pytest.param(bare("vit"), 2_692_042, id="Table 3: d9"),
        pytest.param(bare("vit_d15"), 2_523_610, id="Table 3: d15"),
        pytest.param(bare("vit_d30*"), 2_838_790, id="Table 3: d30*"),
        pytest.param(bare("vit_d60"), 2_531_890, id="Table 3: d60"),
        pytest.param(named("vit_d6", shared(5)), 3_091_798 + 60, id="Table 3: d6 GMM"),
        pytest.param(named("vit", shared(3)), 2_692_042 + 54, id="Table 3: d9 GMM"),
        pytest.param(named("vit_d15", shared(5)), 2_523_610 + 150, id="Table 3: d15 GMM"),
        pytest.param(named("vit_d30*", shared(3)), 2_838_790 + 180, id="Table 3: d30* GMM"),
        pytest.param(named("vit_d60", shared(3)), 2_531_890 + 360, id="Table 3: d60 GMM"),
        pytest.param(named("vit", ELM), 2_728_906, id="Table 6: ELM d9"),
        pytest.param(named("vit_d15", ELM), 2_585_050, id="Table 6: ELM d15"),
        pytest.param(named("vit", shared(8)), 2_692_186, id="Table 6: GMM d9 K 8"),
        pytest.param(named("vit_d30**", shared(5)), 8_917_750, id="Table 4: GMM d30**"),
        pytest.param(named("cait", PLAIN), 9_020_618, id="Table 4: CaiT"),
        pytest.param(heat(PLAIN), 2_469_128, id="Table 5: heat plain"),
        pytest.param(heat(ELM), 2_469_128 + 524_288, id="Table 5: heat ELM"),
        pytest.param(heat(GMM), 2_469_128 + 480, id="Table 5: heat GMM"),
        pytest.param(named("vit", PLAIN), 2_692_426, id="released vit plain"),
        pytest.param(named("vit", GMM), 2_693_122, id="released vit GMM"),
        pytest.param(named("swin", PLAIN), 7_073_188, id="released swin plain"),
        pytest.param(named("swin", GMM), 7_074_088, id="released swin GMM"),
        pytest.param(named("pit", PLAIN), 6_972_586, id="released pit plain"),
        pytest.param(named("pit", GMM), 6_973_186, id="released pit GMM"),
        pytest.param(named("pit", ELM), 7_129_258, id="released pit ELM"),
        pytest.param(named("t2t", PLAIN), 6_486_080, id="released t2t plain"),
        pytest.param(named("t2t", GMM), 6_486_570, id="released t2t GMM"),
        pytest.param(named("cait", GMM), 9_021_578, id="released cait GMM"),
    ],
)
def test_trainable_parameters(spec: ModelSpec, count: int) -> None:
    with torch.device("meta"):
        assert trainable_parameters(model_from_spec(spec)) == count


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("spec", "millions"),
    [
        pytest.param(bare("vit"), 184.6, id="vit"),
        pytest.param(named("swin", PLAIN), 240.9, id="swin"),
        pytest.param(named("pit", PLAIN), 274.4, id="pit"),
        pytest.param(named("t2t", PLAIN), 450.1, id="t2t"),
        pytest.param(named("cait", PLAIN), 595.7, id="cait"),
    ],
)
def test_macs_of_the_networks_of_table_1(spec: ModelSpec, millions: float) -> None:
    """With the products of attention, which the paper's figures lack, and without the norms, which they have."""
    assert multiply_accumulates(spec) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["vit", "swin", "cait", "pit", "t2t"])
def test_a_mask_costs_no_macs(name: str) -> None:
    masked, plain = named(name, GMM), named(name, PLAIN)
    if name == "vit":
        plain = bare(name)
    assert multiply_accumulates(masked) == multiply_accumulates(plain)
