from __future__ import annotations

from dataclasses import replace

import pytest

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families import spec_from_json
from gmmvit_deploy.models.families.custom import CustomSpec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec, spec_to_json

SPEC = ViTSpec(
    image_size=32,
    patch_size=4,
    classes=10,
    dim=48,
    depth=3,
    heads=3,
    head_dim=16,
    mlp_dim=96,
    class_token=False,
    mask=MaskSpec(kind="gmm", kernels=5, shared=True, closed_form=True),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 5}, "expected a divisor of the image size"),
        ({"heads": 0}, "heads: expected whole numbers of at least 1, got 0"),
        ({"class_token": True}, "no class token"),
    ],
    ids=["patches that do not tile", "no heads", "class token with a mask"],
)
def test_refuses_what_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, **change)


@pytest.mark.parametrize("data", [{}, {"family": "resnet"}, {"family": "vit"}, {**spec_to_json(SPEC), "colour": 1}])
def test_json_of_something_else(data: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        spec_from_json(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("code_sha256", "00"), ("code_sha256", ["0" * 64]), ("code_file", ""), ("class_name", 3), ("model_args", [1])],
)
def test_json_of_a_custom_spec_that_contradicts_itself(field: str, value: object) -> None:
    spec = CustomSpec(
        image_size=16, channels=3, classes=5, mask=MaskSpec(), code_file="a.py", code_sha256="0" * 64, class_name="Net"
    )
    assert spec_from_json(spec_to_json(spec)) == spec
    with pytest.raises(SpecError):
        spec_from_json({**spec_to_json(spec), field: value})
