"""A digit has two labels, itself and whether it is even: from training to the server, classify, the page and parity.

The bundle also has features, and a label that occurs twice.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import jsonschema
import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score
from torch.nn import functional

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.checkpoints.loading import released_state_dict
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.images.data.formats import digits
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit.spec_and_source import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.parity.report import SCHEMA_PATH
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.serving.front.options import FRONT_HEADER, FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.browser import open_chromium
from tests.conftest import FREE_PORTS

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
SIDE = 16
NAMES = (*"0123456789", "even", "even")  # the second "even" is a class that no image has
THRESHOLDS = (0.5,) * 10 + (0.6, 0.9)
Command = Callable[..., subprocess.CompletedProcess[str]]


def labels_of(classes: np.ndarray) -> np.ndarray:
    return np.column_stack([np.eye(10)[classes], classes % 2 == 0, np.zeros(len(classes))]).astype(np.float32)


def trained() -> torch.nn.Module:
    torch.manual_seed(0)
    mask = MaskSpec(kind="gmm", kernels=3)
    spec = ViTSpec(
        image_size=SIDE, patch_size=4, classes=12, dim=32, depth=2, heads=2, head_dim=16, mlp_dim=64, class_token=False,
        mask=mask, channels=1,
    )  # fmt: skip
    image = ImageSpec(height=SIDE, width=SIDE, channels=1, mean=(0.3,), std=(0.38,))
    part = digits("train")
    pixels = np.stack([part.pixels(index, image) for index in range(len(part))])
    images = torch.from_numpy(image.tensor_from_pixels(pixels))
    truth = torch.from_numpy(labels_of(np.array([part.label(index) for index in range(len(part))])))
    model = model_from_spec(spec).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(8):
        for rows in torch.randperm(len(images)).split(64):
            loss = functional.binary_cross_entropy_with_logits(model(images[rows]), truth[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, labels, thresholds, and a table of 60 held-out digits as PNG files."""
    folder = tmp_path_factory.mktemp("multi")
    torch.save({"model_state_dict": released_state_dict(trained()), "epoch": 8}, folder / "checkpoint.pth")
    (folder / "labels.txt").write_text("\n".join(NAMES))
    (folder / "thresholds.txt").write_text("\n".join(map(str, THRESHOLDS)))
    part = digits("test")
    with (folder / "table.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("file", *"0123456789", "even (10)"))
        for index in range(60):
            (folder / f"{index}.png").write_bytes(part.encoded(index))
            table.writerow((f"{index}.png", *labels_of(np.array([part.label(index)]))[0, :11].astype(int)))
    return folder


@pytest.fixture(scope="module")
def multi(folder: Path, gmmvit: Command) -> Bundle:
    words = ("--labels", folder / "labels.txt", "--thresholds", folder / "thresholds.txt", "--task", "multi")
    words += ("--mean", "0.3", "--std", "0.38", "--set", "channels=1", "--max-batch", "8", "--outputs", "both")
    answer = gmmvit("export", folder / "checkpoint.pth", "-o", folder / "bundle", *words)
    assert answer.returncode == 0, answer.stderr
    assert "12 (multi-label)" in answer.stdout
    return open_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def server(multi: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = repository_from_bundle(multi, tmp_path_factory.mktemp("served") / "models")
    with TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


def truth_of(folder: Path) -> dict[str, set[str]]:
    with (folder / "table.csv").open() as file:
        return {row.pop("file"): {name for name, value in row.items() if value == "1"} for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def logits(multi: Bundle, folder: Path) -> np.ndarray:
    """PyTorch's logits of the 60 digits, float64 (60, 12)."""
    image = multi.manifest.image
    files = [folder / f"{index}.png" for index in range(60)]
    tensors = image.tensor_from_pixels(np.stack([image.pixels_from_bytes(file.read_bytes()) for file in files]))
    with torch.no_grad():
        model = model_from_bundle(multi.manifest, multi.weights_path).double()
        return model(torch.from_numpy(tensors).double()).numpy()


def test_the_server_gives_the_labels_of_pytorch(logits: np.ndarray, server: TritonServer, folder: Path) -> None:
    probabilities = 1 / (1 + np.exp(-logits))
    for url in (server.grpc_url, server.http_url):
        with TritonClassifier(url) as classifier:
            answers = classify_files(classifier, [folder / f"{index}.png" for index in range(60)], features=True)
            names = classifier.label_set.names
        assert names[10:] == ("even (10)", "even (11)")
        for row, answer in zip(probabilities, answers, strict=True):
            present = {names[guess.index] for guess in answer.predictions if guess.present}
            assert present == {names[index] for index in np.flatnonzero(row >= THRESHOLDS)}
            assert answer.features is not None
            assert answer.features.shape == (32,)
            for guess in answer.predictions:
                assert guess.probability == pytest.approx(row[guess.index], abs=1e-5)
                assert guess.threshold == THRESHOLDS[guess.index]
    given = [set(classifier.label_set.decided(answer.predictions)) for answer in answers]
    right = sum(labels == truth for labels, truth in zip(given, truth_of(folder).values(), strict=True))
    assert right > 30, "the network was trained; if most images are wrong, labels are in another order"


def test_the_classification_extension_keeps_repeated_labels_apart(multi: Bundle, server: TritonServer) -> None:
    images = np.array([[image] for image in multi.golden_set().images], dtype=np.object_)[:4]
    with TritonConnection(server.grpc_url) as connection:
        best = connection.best_classes("gmmvit", "IMAGE", images)
    assert [label for _, label in best] == [NAMES[index] for index, _ in best]


def test_classify_prints_the_labels_above_their_thresholds(
    logits: np.ndarray, multi: Bundle, folder: Path, gmmvit: Command
) -> None:
    printed = gmmvit("classify", folder / "0.png", "--bundle", multi.path, "--top", 1).stdout
    names = multi.manifest.label_set.names
    for index, name in enumerate(names):
        assert (f" {name} " in printed) == (1 / (1 + np.exp(-logits[0, index])) >= THRESHOLDS[index])
    answer = json.loads(gmmvit("classify", folder / "0.png", "--bundle", multi.path, "--json").stdout)
    assert answer[0]["predictions"][0].keys() == {"label", "index", "probability", "threshold", "present"}


def test_the_front_states_thresholds(logits: np.ndarray, server: TritonServer, folder: Path) -> None:
    secret = os.urandom(16).hex()
    with FrontProcess(FrontOptions(triton_url=server.grpc_url), secret) as front:
        front.wait_ready()
        answer = httpx.post(
            f"{front.url}/classify?top=1", content=(folder / "0.png").read_bytes(), headers={FRONT_HEADER: secret}
        )
    (guesses,) = answer.json()["predictions"]
    for guess in guesses:
        probability = 1 / (1 + np.exp(-logits[0, guess["index"]]))
        assert guess["probability"] == pytest.approx(probability, abs=1e-5)
        assert guess["present"] == (probability >= guess["threshold"])


def test_the_page_shows_the_labels_and_their_thresholds(logits: np.ndarray, server: TritonServer, folder: Path) -> None:
    with FrontProcess(FrontOptions(triton_url=server.grpc_url), None) as front, open_chromium() as browser:
        front.wait_ready()
        page = browser.new_page()
        page.goto(front.url)
        page.set_input_files("#file", folder / "0.png")
        page.wait_for_selector("table")
        shown = page.locator("tbody th").all_inner_texts()
    for index, name in enumerate(NAMES):
        threshold = f"{100 * THRESHOLDS[index]:.1f} %"
        present = 1 / (1 + np.exp(-logits[0, index])) >= THRESHOLDS[index]
        assert (f"{name} (present, at least {threshold})" in shown) == present
    assert any("(absent, below " in text for text in shown)


def test_parity_reports_map_and_f1_of_scikit_learn(
    logits: np.ndarray, multi: Bundle, server: TritonServer, folder: Path, gmmvit: Command
) -> None:
    words = ("--data", f"table:{folder / 'table.csv'}", "--runner", "onnxruntime,triton-grpc", "--url", server.grpc_url)
    answer = gmmvit("parity", multi.path, *words, "--json", "--report", folder / "report.html")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    jsonschema.validate(report, json.loads(SCHEMA_PATH.read_text()))
    runners = report["runners"]
    names = multi.manifest.label_set.names
    truth = np.array([[name in labels for name in names] for labels in truth_of(folder).values()])
    thresholds = np.array(multi.manifest.label_set.threshold_logits)
    mixed = truth.any(0)
    expected = {
        "map": average_precision_score(truth[:, mixed], logits[:, mixed], average="macro"),
        "f1_macro": f1_score(truth, logits >= thresholds, average="macro", zero_division=0),
        "f1_micro": f1_score(truth, logits >= thresholds, average="micro", zero_division=0),
    }
    assert len(runners) == 2
    for runner in runners:
        checks = {check["name"]: check for check in runner["checks"]}
        assert checks["decisions"]["verdict"] == "passed"
        assert checks["decisions"]["summary"].startswith("the same labels on ")
        for who in ("pytorch", "runner"):
            assert checks["accuracy"]["details"]["measures"][who] == pytest.approx(expected, abs=1e-3)
    assert "macro F1" in (folder / "report.html").read_text()
