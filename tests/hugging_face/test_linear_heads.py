"""A backbone with a linear layer that a user trained on its frozen features, with PyTorch or scikit-learn.

Expected are transformers' own features, the layer of PyTorch, and the probabilities of scikit-learn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import transformers
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression

from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.cli.terminal import gmmvit_here
from tests.hugging_face.folders import BACKBONES

pytestmark = pytest.mark.integration

IMAGES = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
POOLS = {"dinov3_backbone": None, "siglip_backbone": None, "vit_backbone": "cls"}


@torch.no_grad()
def features(folder: Path, name: str) -> torch.Tensor:
    network = getattr(transformers, BACKBONES[name][0]).from_pretrained(folder).double().eval()
    output = network(IMAGES)
    return output.last_hidden_state[:, 0] if POOLS[name] == "cls" else output.pooler_output


@pytest.mark.first(2)
@pytest.mark.parametrize("name", POOLS)
def test_the_logits_are_those_of_the_layer_on_transformers_features(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(32, 4)
    torch.save(layer.state_dict(), tmp_path / "head.pth")
    torch.save(nn.Sequential(layer).state_dict(), tmp_path / "head.pt")
    save_file({f"fc.{key}": tensor for key, tensor in layer.state_dict().items()}, tmp_path / "head.safetensors")
    with torch.no_grad():
        expected = layer.double()(features(folders(name), name))
    assert float(expected.std()) > 0.1
    for file in ("head.pth", "head.pt", "head.safetensors"):
        loaded = load_checkpoint(folders(name), LoadHints(head=str(tmp_path / file), pool=POOLS[name]))
        assert (loaded.spec.classes, loaded.spec.head_features, loaded.images.labels) == (4, 32, None)
        with torch.no_grad():
            torch.testing.assert_close(loaded.model.double()(IMAGES), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_probabilities_are_those_of_scikit_learn(
    classes: int, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    frozen = features(folders("dinov3_backbone"), "dinov3_backbone").numpy()
    classifier = LogisticRegression().fit(frozen, np.arange(len(frozen)) % classes)
    assert classifier.coef_.shape[0] == (1 if classes == 2 else classes)
    np.savez(tmp_path / "head.npz", coef_=classifier.coef_, intercept_=classifier.intercept_)
    loaded = load_checkpoint(folders("dinov3_backbone"), LoadHints(head=str(tmp_path / "head.npz")))
    with torch.no_grad():
        probabilities = loaded.model.double()(IMAGES).softmax(1).numpy()
    np.testing.assert_allclose(probabilities, classifier.predict_proba(frozen), rtol=0, atol=1e-6)


def test_the_command_line_exports_a_head_with_its_labels(folders: Callable[[str], Path], tmp_path: Path) -> None:
    torch.save(nn.Linear(32, 3).state_dict(), tmp_path / "head.pt")
    words = ("--head", tmp_path / "head.pt", "--labels", "cat,dog,fox", "--outputs", "both", "--max-batch", "8")
    answer = gmmvit_here("export", folders("dinov3_backbone"), "-o", tmp_path / "bundle", *words)
    assert answer.status == 0, answer.err
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.labels == ("cat", "dog", "fox")
    assert [(output.name, output.shape) for output in manifest.outputs] == [("logits", (3,)), ("features", (32,))]


def _arrays(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def _layer(path: Path, features: int) -> Path:
    torch.save(nn.Linear(features, 3).state_dict(), path)
    return path


def _text(path: Path) -> Path:
    path.write_text("no arrays")
    return path


@pytest.mark.parametrize(
    ("name", "make", "words", "message", "hint"),
    [
        ("dinov3_backbone", lambda p: _layer(p / "h.pt", 64), (), "reads 64 features, but .* has 32", "this backbone"),
        (
            "dinov3_backbone",
            lambda p: _arrays(p / "h.npz", weight=np.zeros((3, 32)), intercept_=np.zeros(3)),
            (),
            r"expected coef_ .* got weight \(3, 32\), intercept_ \(3,\)",
            "coef_=classifier.coef_",
        ),
        (
            "dinov3_backbone",
            lambda p: _arrays(p / "h.npz", coef_=np.zeros((3, 32)), intercept_=np.zeros(1)),
            (),
            r"expected coef_ .* got coef_ \(3, 32\), intercept_ \(1,\)",
            "intercept_=classifier.intercept_",
        ),
        ("dinov3_backbone", lambda p: _text(p / "h.npz"), (), "expected an .npz file of numpy", "numpy.savez"),
        (
            "dinov3_backbone",
            lambda p: _layer(p / "h.pt", 32),
            ("--set", "head_blocks=4"),
            "reads the class tokens of 4 blocks",
            "leave --set head_blocks",
        ),
        ("vit", lambda p: _layer(p / "h.pt", 32), (), "--head is for a backbone", "leave --head out"),
        ("vit_backbone", lambda p: _layer(p / "h.pt", 32), (), "the folder does not state which", "--set pool=cls"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    name: str,
    make: Callable[[Path], Path],
    words: tuple[str, ...],
    message: str,
    hint: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    answer = gmmvit_here("export", folders(name), "-o", tmp_path / "b", "--head", make(tmp_path), *words, columns=500)
    assert answer.status == 1
    assert re.search(message, answer.err)
    assert hint in answer.err
    assert not (tmp_path / "b").exists()
