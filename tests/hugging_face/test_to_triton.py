"""Models of transformers on their whole way to the answer for a PNG file, all on a single server.

digits: a ViT that a user fine-tuned on digits in a loop of their own.  dinov2: a DINOv2 backbone without a classifier.
tags: a multi-label ViT with logits and features.  clip: a CLIP whose classes are texts.  Expected are transformers' own
results: its image processor with Pillow, and the model that ``from_pretrained`` builds from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers")
import transformers
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
from transformers.image_utils import load_image

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.server import TritonServer
from tests.cli.terminal import gmmvit_here
from tests.hugging_face.folders import LABELS, built, processed, saved
from tests.timm.test_to_triton import one_server

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

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
def tags(trained: Trained) -> Bundle:
    """A multi-label bundle; the thresholds are about the median of the probabilities on the PNG files."""
    root = trained.folder.parent
    folder = saved("vit", root / "tags", built("vit", problem_type="multi_label_classification"))
    thresholds = np.median(1 / (1 + np.exp(-own(folder, trained).logits.numpy())), axis=0) + 1e-3
    # In another order than the labels: the names decide.
    named = dict(reversed([*zip(LABELS, thresholds.tolist(), strict=True)]))
    (root / "thresholds.json").write_text(json.dumps(named))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        words = ("--task", "multi", "--thresholds", "thresholds.json", "--outputs", "both")
        answer = gmmvit_here("export", "tags", "-o", "tags_bundle", *words)
    assert answer.status == 0, answer.err
    bundle = open_bundle(root / "tags_bundle")
    assert bundle.manifest.labels == LABELS
    assert bundle.manifest.thresholds == tuple(thresholds)
    return bundle


@pytest.fixture(scope="module")
def backbone(trained: Trained) -> Bundle:
    root = trained.folder.parent
    folder = saved("dinov2_backbone", root / "dinov2")
    answer = gmmvit_here("export", folder, "-o", root / "dinov2_bundle", "--outputs", "features", "--max-batch", "8")
    assert answer.status == 0, answer.err
    assert "features: float32 (1..8, 32), the pooler of transformers (pooler_output)" in answer.out
    return open_bundle(root / "dinov2_bundle")


@pytest.fixture(scope="module")
def clip(trained: Trained) -> Bundle:
    root = trained.folder.parent
    saved("clip_model", root / "clip")
    (root / "labels.txt").write_text("".join(f"{word}\n" for word in WORDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        words = ("--labels", "labels.txt", "--prompt", "a photo of a {}")
        answer = gmmvit_here("export", "clip", "-o", "clip_bundle", *words)
    assert answer.status == 0, answer.err
    return open_bundle(root / "clip_bundle")


@pytest.fixture(scope="module")
def served(
    exported: Bundle, tags: Bundle, backbone: Bundle, clip: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    bundles = {"digits": exported, "tags": tags, "dinov2": backbone, "clip": clip}
    with one_server(bundles, tmp_path_factory.mktemp("served")) as running:
        yield running


@torch.no_grad()
def own(folder: Path, trained: Trained, *, count: int = 40) -> Any:
    """Return what transformers computes in float64 from the first PNG files."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    network = getattr(transformers, name).from_pretrained(folder).double().eval()
    if hasattr(network, "classifier"):
        network.classifier.register_forward_pre_hook(lambda layer, given: setattr(layer, "read", given[0]))
    tensors = torch.cat([processed(folder, load_image(str(path))) for path in trained.files[:count]])
    output = network(tensors.double())
    output.features = network.classifier.read if hasattr(network, "classifier") else output.pooler_output
    return output


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


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_multi_label_folder_gives_the_labels_of_transformers(
    protocol: str, trained: Trained, tags: Bundle, served: TritonServer
) -> None:
    expected = own(trained.folder.parent / "tags", trained)
    probabilities = expected.logits.sigmoid().numpy()
    present = probabilities >= np.array(tags.manifest.thresholds)
    assert 0.2 < present.mean() < 0.8
    url = served.grpc_url if protocol == "grpc" else served.http_url
    with TritonClassifier(url, model="tags") as classifier:
        answers = classify_files(classifier, trained.files[: len(present)], features=True)
    for row, labels, features, answer in zip(probabilities, present, expected.features, answers, strict=True):
        assert {guess.label for guess in answer.predictions if guess.present} == {*np.array(LABELS)[labels]}
        for guess in answer.predictions:
            assert guess.probability == pytest.approx(row[guess.index], abs=ATOL)
        np.testing.assert_allclose(answer.features, features.numpy(), rtol=0, atol=ATOL)
    printed = gmmvit_here("classify", trained.files[0], "--bundle", tags.path, "--top", "1")
    shown = {label for label in LABELS if f" {label} " in printed.out}
    assert shown == {*np.array(LABELS)[present[0]], LABELS[probabilities[0].argmax()]}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_features_of_a_dinov2_backbone_are_within_parity_s_limits(
    protocol: str, trained: Trained, backbone: Bundle, served: TritonServer
) -> None:
    url = served.grpc_url if protocol == "grpc" else served.http_url
    expected = own(trained.folder.parent / "dinov2", trained).pooler_output.numpy()
    with TritonClassifier(url, model="dinov2") as classifier:
        answers = classify_files(classifier, trained.files[: len(expected)], features=True)
    given = np.stack([answer.features for answer in answers])
    limit = backbone.manifest.export_parity["limit"]
    assert expected.std(axis=0).min() > 100 * limit
    assert np.abs(given - expected).max() <= limit
    with TritonRunner(backbone, url, model="dinov2") as runner:
        (report,) = check_parity(backbone, [runner]).runners
    verdicts = {check.name: check.verdict for check in report.checks}
    assert (verdicts["numeric"], verdicts["preprocessing"]) == ("passed", "passed")


@torch.no_grad()
def test_a_clip_gives_the_probabilities_of_transformers(trained: Trained, clip: Bundle, served: TritonServer) -> None:
    folder, files = trained.folder.parent / "clip", trained.files[:20]
    network = transformers.CLIPModel.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer([f"a photo of a {word}" for word in WORDS], return_tensors="pt", padding=True)
    tensors = torch.cat([processed(folder, load_image(str(path))) for path in files]).double()
    expected = network(pixel_values=tensors, **tokens).logits_per_image.softmax(1).numpy()
    assert expected.max() > 2 * expected.min()
    with TritonClassifier(served.http_url, model="clip") as classifier:
        for row, answer in zip(expected, classify_files(classifier, files, top=len(WORDS)), strict=True):
            given = {guess.label: guess.probability for guess in answer.predictions}
            np.testing.assert_allclose([given[word] for word in WORDS], row, rtol=0, atol=ATOL)
