"""A network in memory: exported by its class, which other processes can import, or refused with what to type."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import gmmvit_deploy
from gmmvit_deploy import ExportOptions, OptimizeOptions, ParityOptions
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families.custom import CustomSpec
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from tests.cli.terminal import gmmvit_here
from tests.models.families.custom.own_files import ARGUMENTS, NETWORK, forget_files

EXAMPLE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
STATED: dict[str, Any] = {"example": EXAMPLE, "mean": [0.5] * 3, "std": [0.25] * 3, "labels": [*"abcde"]}
SWIN = {"depths": [1, 1], "embed_dim": 24, "num_heads": [1, 1], "num_classes": 5}
MEMORY = f"""from huggingface_hub import PyTorchModelHubMixin
{NETWORK.replace("from torch import nn", "from .layers import nn")}

class Probabilities(Net):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Shared(Net, PyTorchModelHubMixin):
    pass


def closed():
    class Inner(Net):
        pass
    return Inner()
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of a user's package, with a relative import."""
    package = tmp_path / "package_of_a_user"
    package.mkdir()
    for name, text in {"__init__": "", "layers": "from torch import nn\n", "nets": MEMORY}.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    forget_files(monkeypatch)
    from package_of_a_user import nets  # type: ignore[import-not-found]

    yield nets
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]


@pytest.mark.integration
def test_a_network_in_memory_and_what_the_bundle_records(
    nets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nets.Net(**ARGUMENTS).train()
    bundle = gmmvit_deploy.export(network, tmp_path / "bundle", model_args=ARGUMENTS, outputs="logits", **STATED)
    spec = bundle.manifest.spec
    assert isinstance(spec, CustomSpec)
    assert (spec.code_file, spec.class_name, spec.model_args) == ("nets.py", "Net", ARGUMENTS)
    assert bundle.manifest.labels == ("a", "b", "c", "d", "e")
    assert network.training
    stored = bundle.golden_set()
    with torch.inference_mode():
        expected = network.eval()(torch.from_numpy(stored.tensors)).numpy()
    with gmmvit_deploy.open_runner("onnxruntime", tmp_path / "bundle") as runner:
        np.testing.assert_allclose(runner.run(stored.inputs), expected, rtol=0, atol=1e-5)
    forget_files(monkeypatch)  # as a new process, which names the file
    answer = gmmvit_here("parity", bundle.path, "--runner", "eager", "--model", f"{nets.__file__}:Net")
    assert answer.status == 0, answer.err


@pytest.mark.integration
@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "model_args"), [("test_vit", {"img_size": 64}), ("test_resnet", {})])
def test_a_network_of_timm_at_the_size_of_the_example(name: str, model_args: dict[str, Any], tmp_path: Path) -> None:
    network = timm.create_model(name, num_classes=5, **model_args)
    stated = STATED | {"example": torch.randn(2, 3, 64, 64), "resize": "center-bicubic"}
    bundle = gmmvit_deploy.export(network, tmp_path / "bundle", **stated)
    assert isinstance(bundle.manifest.spec, TimmSpec)
    assert (bundle.manifest.spec.architecture, bundle.input_shape) == (name, (64, 64, 3))


@pytest.mark.parametrize(
    ("make", "changes", "message", "hint"),
    [
        (lambda nets: nets.Net(**ARGUMENTS), {}, "module: .* keys do not fit the class Net", "give model_args"),
        (lambda nets: nets.Net(heads=2), {}, "gives other logits, which differ by up to", "give model_args"),
        (lambda nets: nets.Probabilities(), {}, "module: .* got probabilities", "returns only the logits"),
        (lambda nets: nets.closed(), {}, "class closed.<locals>.Inner is defined inside", "from net import Inner"),
        (
            lambda nets: type("Cell", (nets.Net,), {"__module__": "__main__"})(),
            {},
            "in this notebook",
            "from net import",
        ),
        (lambda nets: nets.Net(), {"example": EXAMPLE[:, :, :8]}, r"square images, .* got .*\(2, 3, 8, 16\)", "randn"),
        (lambda nets: nets.Shared(), {"labels": ["a"]}, "labels: expected 5 labels", "of each class"),
        (
            lambda nets: type("Own", (nets.Net,), {"__module__": "transformers.modeling_utils"})(),
            {},
            "Own is a network of Hugging Face",
            "save_pretrained",
        ),
        (lambda nets: VisionTransformer(depth=1), {}, "VisionTransformer of timm was built as a class", "create_model"),
        (lambda nets: timm.create_model("test_vit"), {}, "module: the size of example is 16 × 16", "of training"),
        (
            lambda nets: timm.create_model("swin_tiny_patch4_window7_224", img_size=112, **SWIN),
            {"model_args": SWIN, "example": torch.zeros(1, 3, 224, 224), "labels": None},
            r"example: .*\(1, 3, 224, 224\).* match model \(112\)",
            "of training",
        ),
    ],
    ids=["keys", "logits", "softmax", "closure", "notebook", "example", "labels", "hub", "class", "resampled", "size"],
)
def test_a_network_that_is_refused(
    make: Any, changes: dict[str, Any], message: str, hint: str, nets: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        gmmvit_deploy.export(make(nets), tmp_path / "bundle", **STATED | changes)
    assert hint in refused.value.hint
    assert not (tmp_path / "bundle").exists()


def test_options_as_a_notebook_states_them() -> None:
    options = ExportOptions(outputs="features", mean=[0.5] * 3, std=[0.25] * 3)  # type: ignore[arg-type]
    assert (options.outputs, options.mean) == (("features",), (0.5,) * 3)
    images = ParityOptions(data="digits").images
    assert images is not None
    assert OptimizeOptions(data="digits").images.name == images.name
    for wrong in ({"outputs": "both"}, {"resize": "centre"}, {"max_batch": "8"}, {"labels": "a,b"}, {"task": "multi"}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}: expected"):
            ExportOptions(**wrong)  # type: ignore[arg-type]
    for options_of in (ParityOptions, OptimizeOptions):
        with pytest.raises(InputError, match="nowhere"):
            options_of(data="folder:nowhere")
