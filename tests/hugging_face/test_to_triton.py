"""A ViT of transformers, fine-tuned on digits in a loop of a user, on its whole way to the label of a PNG file.

Expected are transformers' own results: its image processor with Pillow, and the model that ``from_pretrained`` builds
from the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers")
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
from transformers.image_utils import load_image

from gmmvit_deploy.artifacts import Bundle, open_bundle
from gmmvit_deploy.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtime.triton import TritonConnection
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.cli.terminal import gmmvit_here
from tests.conftest import FREE_PORTS
from tests.hugging_face.folders import processed

pytestmark = [pytest.mark.export, pytest.mark.server]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 200
ATOL = 2e-5  # of logits, as for the golden files


@dataclass(frozen=True)
class Trained:
    """folder: as ``save_pretrained`` wrote it.  files, digits: the PNG files that training did not see."""

    folder: Path
    files: list[Path]
    digits: list[int]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Fine-tune a ViT with transformers alone, as a user does."""
    root = tmp_path_factory.mktemp("digits")
    pixels, digits = load_digits(return_X_y=True)
    images = [Image.fromarray((picture.reshape(8, 8) * 15.9).astype(np.uint8), "L") for picture in pixels]
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    tensors = processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            id2label=dict(enumerate(WORDS)),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    labels = torch.from_numpy(digits)
    for _ in range(14):
        for batch in torch.randperm(len(images) - HELD_OUT).split(64):
            loss = model(pixel_values=tensors[batch], labels=labels[batch]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(root / "digits_vit")
    processor.save_pretrained(root / "digits_vit")
    files = [root / f"digit_{index}.png" for index in range(HELD_OUT)]
    for path, image in zip(files, images[-HELD_OUT:], strict=True):
        image.save(path)
    return Trained(root / "digits_vit", files, digits[-HELD_OUT:].tolist())


@pytest.fixture(scope="module")
def exported(trained: Trained) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained.folder.parent)
        answer = gmmvit_here("export", "digits_vit", "-o", "digits_bundle")
    assert (answer.status, answer.out.splitlines()[-1]) == (0, "digits_bundle"), answer.err
    return open_bundle(trained.folder.parent / "digits_bundle")


@pytest.fixture(scope="module")
def served(exported: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    models = tmp_path_factory.mktemp("served") / "models"
    repository_from_bundle(exported, models, RepositoryOptions(name="digits", threads=1))
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


def test_the_server_answers_as_transformers_does(trained: Trained, served: TritonServer) -> None:
    model = ViTForImageClassification.from_pretrained(trained.folder).double().eval()
    with torch.no_grad():
        tensors = torch.cat([processed(trained.folder, load_image(str(path))) for path in trained.files])
        logits = model(tensors.double()).logits
    assert float((logits.argmax(1) == torch.tensor(trained.digits)).double().mean()) > 0.8
    images = np.array([[path.read_bytes()] for path in trained.files[:64]], dtype=np.object_)
    with TritonConnection(served.grpc_url) as connection:
        answer = connection.infer("digits", "IMAGE", images)
    np.testing.assert_allclose(answer, logits[:64].numpy(), rtol=0, atol=ATOL)
    probabilities = logits.softmax(1)
    for url in (served.grpc_url, served.http_url):
        with TritonClassifier(url, model="digits") as classifier:
            results = classify_files(classifier, trained.files, top=1)
        assert [result.predictions[0].label for result in results] == [WORDS[index] for index in logits.argmax(1)]
        given = [result.predictions[0].probability for result in results]
        np.testing.assert_allclose(given, probabilities.max(1).values, rtol=0, atol=ATOL)


def test_the_folder_states_everything(exported: Bundle) -> None:
    manifest = exported.manifest
    assert manifest.labels == WORDS
    assert (manifest.image.resize, manifest.image.mean, manifest.image.std) == (
        "stretch-bilinear",
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
    )
    assert manifest.checkpoint["wrapping"] == "model folder of Hugging Face transformers, safetensors"
    assert "transformers" in manifest.versions


def test_the_bundle_passes_parity(exported: Bundle) -> None:
    answer = gmmvit_here("parity", exported.path, "--runner", "onnxruntime")
    assert answer.status == 0, answer.err
