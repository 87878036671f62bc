"""Shapes and data types of a model are known without its values, and without the import of PyTorch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

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


def test_arithmetic_keeps_shapes_and_types() -> None:
    whole = torch.zeros(4, 1, dtype=torch.int64, device="meta")
    half = torch.zeros(3, dtype=torch.float16, device="meta")
    with shapes_only():
        stacked = torch.stack([whole, whole], dim=-1)
        results = (2 * whole, whole / 2, 1.5 * whole, whole + half, half**2, 1 - half, -half, whole.exp(), stacked)
    assert [(tuple(result.shape), result.dtype) for result in results] == [
        ((4, 1), torch.int64),
        ((4, 1), torch.float32),
        ((4, 1), torch.float32),
        ((4, 3), torch.float16),
        ((3,), torch.float16),
        ((3,), torch.float16),
        ((3,), torch.float16),
        ((4, 1), torch.float32),
        ((4, 1, 2), torch.int64),
    ]


def test_a_tensor_with_values_keeps_them() -> None:
    with shapes_only():
        values = torch.arange(3, device="cpu") * 2
        layer = nn.Linear(2, 3, device="cpu")
    assert values.tolist() == [0, 2, 4]
    assert layer.weight.abs().sum() > 0


@pytest.mark.first(1)
@pytest.mark.process
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
