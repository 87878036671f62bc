"""Models of timm on the whole way: training file → bundle → repository → a real Triton server → labels of PNG files.

Expected are timm's own results: the model that timm builds, with the tensors of the file read by plain PyTorch, on the
same PNG files after timm's own preprocessing; for the MNIST ViT the arithmetic of its tutorial. Nothing of this package
computes an expected value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.cli.terminal import gmmvit_here
from tests.conftest import FREE_PORTS, MANIFEST, golden
from tests.golden_files import content_of
from tests.models.families.test_naive_vit import tutorial_logits, tutorial_state
from tests.serving.conftest import joined_repository

timm = pytest.importorskip("timm")
from timm.data import create_transform, resolve_data_config  # noqa: E402 - after the check that timm is installed

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

ATOL = 2e-5  # of logits, as for the golden files
CLASSES = tuple(f"class{index}" for index in range(10))
THINGS = tuple(f"thing{index}" for index in range(10))
Tensor = torch.Tensor
Reference = Callable[[Image.Image], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file on its way to a server.

    options: what a user types after ``gmmvit export FILE -o BUNDLE``, without options for what the file states.
    labels: the labels that the server must answer with.
    reference: returns a function image → logits (C,) in float64, which uses nothing of this package.
    """

    options: tuple[str, ...]
    reference: Callable[[str], Reference]
    labels: tuple[str, ...] = CLASSES


def built(name: str, state: dict[str, Tensor]) -> torch.nn.Module:
    """Return the model that timm builds from the arguments in the manifest, with these tensors, in float64."""
    build = MANIFEST[name]["build"]
    network: torch.nn.Module = timm.create_model(build["architecture"], **build["model_args"])
    network.load_state_dict(state, strict=True)
    return network.double().eval()


def evaluated(network: torch.nn.Module, config: dict[str, Any], image: Image.Image) -> Tensor:
    """Return the logits for an image after the evaluation transform of timm; timm's data sets convert images to RGB."""
    tensor = create_transform(**config, is_training=False)(image.convert("RGB"))
    with torch.no_grad():
        logits: Tensor = network(tensor[None].double())[0]
    return logits


def by_timm_train_script(name: str) -> Reference:
    """Evaluate a file of timm's train.py with the preprocessing that train.py and validate.py of timm resolve."""
    content = content_of(name)
    network = built(name, content["state_dict"])
    config = resolve_data_config(vars(content["args"]), model=network)
    return lambda image: evaluated(network, config, image)


def by_timm_folder(name: str) -> Reference:
    """Let timm read a model folder by itself: architecture, arguments, weights and preprocessing."""
    network = timm.create_model(f"local-dir:{golden(name).path}", pretrained=True).double().eval()
    config = resolve_data_config({}, model=network)
    return lambda image: evaluated(network, config, image)


def by_the_tutorial(_: str) -> Reference:
    """Evaluate the MNIST ViT as the tutorial does: ToTensor, and no normalisation.

    Images of another size than MNIST's are resized by torchvision before.
    """
    from torchvision.transforms import Compose, Resize, ToTensor

    row, column = np.arange(50)[:, None], np.arange(8)[None]
    angle = row / 10_000 ** ((column - column % 2) / 8)
    positions = torch.from_numpy(np.where(column % 2, np.cos(angle), np.sin(angle))).float()
    transform, state = Compose([Resize((28, 28)), ToTensor()]), tutorial_state()
    return lambda image: tutorial_logits(state, positions, transform(image.convert("L"))[None])[0]


LABELS = ("--labels", ",".join(CLASSES))
CASES: dict[str, Case] = {
    # The file of train.py states mean, std, and the size; its labels stand in no file.
    "timm_vit": Case(options=("--set", "weights=trained", *LABELS), reference=by_timm_train_script),
    # config.json states mean, std, size, crop and filter, and `folder_with_labels` adds labels.
    "timm_swin": Case(options=(), labels=THINGS, reference=by_timm_folder),
    "mnist_vit": Case(
        options=("--image-size", "28", "--set", "channels=1", "--mean", "0", "--std", "1", *LABELS),
        reference=by_the_tutorial,
    ),
}


def picture(width: int, height: int, mode: str, seed: int) -> Image.Image:
    """Return an image with the contrasts of a photograph: coarse patches under fine noise."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (5, 7, 4), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse, "RGBA").resize((width, height), Image.Resampling.NEAREST))
    noisy = np.clip(smooth + generator.normal(0, 20, smooth.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(noisy, "RGBA").convert(mode)


PICTURES = {
    "rgb wide": picture(91, 40, "RGB", 1),
    "rgb tall": picture(33, 120, "RGB", 2),
    "rgb of the model's size": picture(32, 32, "RGB", 3),
    "rgb small": picture(19, 13, "RGB", 4),
    "grey": picture(57, 64, "L", 5),
    "grey of MNIST's size": picture(28, 28, "L", 6),
    "grey with alpha": picture(48, 31, "LA", 7),
    "rgba": picture(70, 51, "RGBA", 8),
    "palette": picture(40, 37, "RGB", 9).quantize(32),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The PNG files, in the order of `PICTURES`."""
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{name.replace(' ', '_')}.png" for name in PICTURES]
    for path, image in zip(paths, PICTURES.values(), strict=True):
        image.save(path)
    return paths


@pytest.fixture(scope="module")
def folder_with_labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model folder ``timm_swin``, with labels in its config.json."""
    path = tmp_path_factory.mktemp("hub") / "timm_swin"
    shutil.copytree(golden("timm_swin").path, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "label_names": THINGS}))
    return path


@pytest.fixture(scope="module")
def bundles(folder_with_labels: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """The bundle of each case, written by ``gmmvit export``."""
    folder = tmp_path_factory.mktemp("exports")
    for name, case in CASES.items():
        path = folder_with_labels if name == "timm_swin" else golden(name).path
        answer = gmmvit_here("export", path, "-o", folder / name, "--max-batch", "8", *case.options)
        assert answer.status == 0, answer.err
    return {name: open_bundle(folder / name) for name in CASES}


@contextmanager
def one_server(bundles: Mapping[str, Bundle], root: Path) -> Iterator[TritonServer]:
    """Start a server with network, preprocessing and ensemble of each bundle."""
    with TritonServer(joined_repository(root, bundles, threads=1), options=ServerOptions(**FREE_PORTS)) as running:
        yield running


@pytest.fixture(scope="module")
def served(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with one_server(bundles, tmp_path_factory.mktemp("timm_served")) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_the_server_answers_as_timm_does(
    name: str, served: TritonServer, files: list[Path], bundles: dict[str, Bundle]
) -> None:
    reference = CASES[name].reference(name)
    logits = np.stack([reference(image).numpy() for image in map(Image.open, files)])
    spec = bundles[name].manifest.image
    stretched = [
        image.convert(spec.mode).resize((spec.width, spec.height), Image.Resampling.BICUBIC)
        for image in PICTURES.values()
    ]
    moved = np.stack([reference(image).numpy() for image in stretched]) - logits
    assert np.abs(moved).max() > 100 * ATOL, "the pictures do not show another crop or filter"
    probabilities = torch.from_numpy(logits).softmax(-1).numpy()
    images = np.array([[path.read_bytes()] for path in files], dtype=np.object_)
    for url in (served.grpc_url, served.http_url):
        with TritonConnection(url) as connection:
            answer = np.concatenate([connection.infer(name, "IMAGE", part) for part in np.split(images, [8])])
        np.testing.assert_allclose(answer, logits, rtol=0, atol=ATOL)
        with TritonClassifier(url, model=name) as classifier:
            results = classify_files(classifier, files, top=2)
        for result, row in zip(results, probabilities, strict=True):
            best = np.argsort(-row)[:2]
            assert [prediction.label for prediction in result.predictions] == [CASES[name].labels[i] for i in best]
            assert [prediction.probability for prediction in result.predictions] == pytest.approx(row[best], abs=ATOL)
