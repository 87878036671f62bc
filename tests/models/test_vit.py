from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.models.vit import ViT
from gmmvit_deploy.specs import MaskSpec, ViTSpec
from tests.models.oracle import vit_logits

MASKS = [
    MaskSpec(),
    MaskSpec(kind="elm"),
    MaskSpec(kind="gmm", kernels=3),
    MaskSpec(kind="gmm", kernels=2, shared=True),
    MaskSpec(kind="gmm", kernels=2, closed_form=True),
    MaskSpec(kind="gmm", kernels=1, shared=True, closed_form=True),
]


@st.composite
def small_specs(draw: st.DrawFn) -> ViTSpec:
    """Any shape the files allow, small enough for loops: head dim need not be dim / heads."""
    mask = draw(st.sampled_from(MASKS))
    patch, grid = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return ViTSpec(
        image_size=patch * grid,
        patch_size=patch,
        classes=draw(st.integers(1, 7)),
        dim=draw(st.integers(1, 12)),
        depth=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 6)),
        mlp_dim=draw(st.integers(1, 9)),
        class_token=mask.kind == "plain" and draw(st.booleans()),
        mask=mask,
    )


@given(spec=small_specs(), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trained_and_folded_agree_with_the_formulas(spec: ViTSpec, seed: int) -> None:
    torch.manual_seed(seed)
    model = ViT(spec).eval()
    image = torch.randn(1, 3, spec.image_size, spec.image_size)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    wanted = vit_logits(spec, state, image[0].numpy())
    with torch.inference_mode():
        trained, folded = model(image)[0].numpy(), fold(model).model(image)[0].numpy()
    # float32 against float64 on logits of order 1: 7.3e-7 was the largest seen over 600 specs
    np.testing.assert_allclose(trained, wanted, rtol=0, atol=5e-6)
    np.testing.assert_allclose(folded, wanted, rtol=0, atol=5e-6)


def _released(dim: int, depth: int, mask: MaskSpec, **changes: int | bool) -> ViTSpec:
    heads = int(changes.pop("heads", 12))
    values = {"image_size": 32, "patch_size": 4, "classes": 10, "class_token": False, **changes}
    return ViTSpec(dim=dim, depth=depth, heads=heads, head_dim=dim // heads, mlp_dim=2 * dim, mask=mask, **values)


def _shared(kernels: int) -> MaskSpec:
    return MaskSpec(kind="gmm", kernels=kernels, shared=True)


PLAIN, ELM = MaskSpec(), MaskSpec(kind="elm")
_HEAT = {"heads": 6, "image_size": 64, "classes": 200}


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        pytest.param(_released(252, 6, PLAIN), 3_091_798, id="Table 3: d6"),
        pytest.param(_released(192, 9, PLAIN), 2_692_042, id="Table 3: d9"),
        pytest.param(_released(144, 15, PLAIN), 2_523_610, id="Table 3: d15"),
        pytest.param(_released(108, 30, PLAIN), 2_838_790, id="Table 3: d30*"),
        pytest.param(_released(72, 60, PLAIN), 2_531_890, id="Table 3: d60"),
        pytest.param(_released(252, 6, _shared(5)), 3_091_798 + 60, id="Table 3: d6 GMM"),
        pytest.param(_released(192, 9, _shared(3)), 2_692_042 + 54, id="Table 3: d9 GMM"),
        pytest.param(_released(144, 15, _shared(5)), 2_523_610 + 150, id="Table 3: d15 GMM"),
        pytest.param(_released(108, 30, _shared(3)), 2_838_790 + 180, id="Table 3: d30* GMM"),
        pytest.param(_released(72, 60, _shared(3)), 2_531_890 + 360, id="Table 3: d60 GMM"),
        pytest.param(_released(192, 9, ELM), 2_728_906, id="Table 6: ELM d9"),
        pytest.param(_released(144, 15, ELM), 2_585_050, id="Table 6: ELM d15"),
        pytest.param(_released(192, 9, _shared(8)), 2_692_186, id="Table 6: GMM d9 K 8"),
        pytest.param(_released(192, 30, _shared(5)), 8_917_750, id="Table 4: GMM d30**"),
        pytest.param(_released(192, 8, PLAIN, **_HEAT), 2_469_128, id="Table 5: heat plain"),
        pytest.param(_released(192, 8, ELM, **_HEAT), 2_469_128 + 524_288, id="Table 5: heat ELM"),
        pytest.param(
            _released(192, 8, MaskSpec(kind="gmm", kernels=5), **_HEAT), 2_469_128 + 480, id="Table 5: heat GMM"
        ),
        pytest.param(_released(192, 9, PLAIN, class_token=True), 2_692_426, id="released vit plain"),
        pytest.param(_released(192, 9, MaskSpec(kind="gmm", kernels=5)), 2_693_122, id="released vit GMM"),
    ],
)
def test_parameter_counts_of_the_paper(spec: ViTSpec, count: int) -> None:
    with torch.device("meta"):
        model = ViT(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
