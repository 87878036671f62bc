"""Shapes and data types of a model are known without its values, and without the import of PyTorch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gmmvit_deploy.models.families import model_from_spec, preset_spec
from gmmvit_deploy.models.layers.shapes_only import shapes_only
from gmmvit_deploy.models.specs import MaskSpec

MASKS = {"plain": MaskSpec(), "gmm": MaskSpec(kind="gmm", kernels=5), "elm": MaskSpec(kind="elm")}


@pytest.mark.parametrize(
    ("family", "mask"),
    [
        *((family, mask) for family in ("vit", "cait", "pit", "t2t") for mask in MASKS),
        ("swin", "plain"),
        ("swin", "gmm"),
    ],
)
def test_as_the_model_with_values(family: str, mask: str) -> None:
    spec = preset_spec(family, classes=10, image_size=32, mask=MASKS[mask])
    with shapes_only():
        built = model_from_spec(spec).state_dict()
    expected = model_from_spec(spec).state_dict()
    assert all(tensor.is_meta for tensor in built.values())
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in built.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()
    }


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize("family", ["vit", "cait", "pit"])  # others use further functions, which PyTorch computes
def test_the_compiler_is_not_imported(family: str) -> None:
    code = (
        "import sys\n"
        "from gmmvit_deploy.models.families import model_from_spec, preset_spec\n"
        "from gmmvit_deploy.models.layers.shapes_only import shapes_only\n"
        "from gmmvit_deploy.models.specs import MaskSpec\n"
        f"spec = preset_spec('{family}', classes=10, image_size=32, mask=MaskSpec(kind='gmm', kernels=5))\n"
        "with shapes_only():\n"
        "    model_from_spec(spec)\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
