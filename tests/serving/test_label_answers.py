"""Labels of photos from a real server, by every way in which clients ask: of a single-label network, and of a
multi-label network that has features too.
"""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from sklearn.metrics import average_precision_score, f1_score

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.inference.labels import Prediction
from gmmvit_deploy.parity.report import SCHEMA_PATH
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier, TritonClassifier, classify_files
from gmmvit_deploy.serving.front.options import FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.browser import open_chromium
from tests.cli.terminal import Gmmvit
from tests.conftest import FREE_PORTS, cifar_options, golden, once
from tests.exact import exact_logits
from tests.inference.test_preprocess import encoded, photo
from tests.serving.conftest import joined_repository
from tests.serving.gateways import request

pytestmark = pytest.mark.integration
LABELS = ("cat: big", "Bär 🐻", '"quoted\\"', "1:2:3", "x", "x", "a,b", "ship", "two words", "end")
THRESHOLDS = (0.5, 0.5, 0.5, 0.5, 0.1, 0.8, 0.94, 0.1, 0.1, 0.7)
SINGLE, MULTI = MODELS = ("single", "gmmvit")
"""``gmmvit parity`` asks the model ``gmmvit``."""
PHOTOS = (encoded(photo(60, 40), "JPEG"), encoded(photo(40, 60, seed=1), "PNG"))
LARGE = encoded(photo(1200, 1000), "JPEG")
"""More pixels than the preprocessing model decodes itself."""


@pytest.fixture(scope="module")
def bundles(bundle: Bundle, shared: Path) -> dict[str, Bundle]:
    """Name of a model → the same network with other labels, single-label and multi-label."""
    single = replace(bundle, manifest=replace(bundle.manifest, labels=LABELS))
    options = cifar_options(labels=LABELS, task="multi-label", thresholds=THRESHOLDS, outputs=("logits", "features"))
    checkpoint = golden("vit_gmm").path
    multi = once(shared / "multi_label", lambda out: bundle_from_checkpoint(checkpoint, out, options))
    return dict(zip(MODELS, (single, multi), strict=True))


@pytest.fixture(scope="module")
def server(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    models = joined_repository(tmp_path_factory.mktemp("labels"), bundles)
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


@pytest.fixture(scope="module")
def local(bundles: dict[str, Bundle]) -> Iterator[dict[str, BundleClassifier]]:
    """Name of a model → the classifier of ``gmmvit classify --bundle``."""
    with ExitStack() as opened:
        yield {name: opened.enter_context(BundleClassifier(bundle)) for name, bundle in bundles.items()}


def classified(
    classifier: BundleClassifier, folder: Path, images: Sequence[bytes], top: int = 5
) -> list[tuple[Prediction, ...]]:
    files = [folder / f"{index}.img" for index in range(len(images))]
    for file, image in zip(files, images, strict=True):
        file.write_bytes(image)
    return [answer.predictions for answer in classify_files(classifier, files, top=top)]


def require_equal(outputs: dict[str, Any], row: int, expected: Sequence[Prediction], top: int) -> None:
    """Compare a row of a model's outputs; of a multi-label model, absent labels beyond ``top`` do not count."""
    listed = outputs.get("present", [[True] * len(outputs["index"][row])] * (row + 1))[row]
    ranks = [rank for rank, present in enumerate(listed) if rank < top or present]
    labels = [outputs["label"][row][rank] for rank in ranks]
    assert [label.decode() if isinstance(label, bytes) else label for label in labels] == [p.label for p in expected]
    assert [outputs["index"][row][rank] for rank in ranks] == [p.index for p in expected]
    probabilities = [outputs["probability"][row][rank] for rank in ranks]
    assert probabilities == pytest.approx([p.probability for p in expected], abs=1e-5)
    if "present" in outputs:
        assert [bool(listed[rank]) for rank in ranks] == [p.present for p in expected]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("package", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def test_the_client_library(
    package: Any, model: str, server: TritonServer, local: dict[str, BundleClassifier], tmp_path: Path
) -> None:
    images = (*PHOTOS, LARGE)
    tensor = package.InferInput("IMAGE", [3, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[image] for image in images], dtype=np.object_))
    url = server.grpc_url if package is tritonclient.grpc else server.http_url
    with package.InferenceServerClient(url.partition("://")[2]) as client:
        for top, parameters in ((5, None), (3, {"top": 3}), (10, {"top": 11})):
            answer = client.infer(f"{model}_classify", [tensor], parameters=parameters)
            names = ("label", "probability", "index", *(("present",) if model == MULTI else ()))
            outputs = {name: answer.as_numpy(name) for name in names}
            for row, expected in enumerate(classified(local[model], tmp_path, images, top)):
                require_equal(outputs, row, expected, top)
        only = [package.InferRequestedOutput("label")]
        assert client.infer(f"{model}_classify", [tensor], outputs=only).as_numpy("probability") is None
        for top in (0, "3", 2.5, True):
            with pytest.raises(tritonclient.utils.InferenceServerException, match="top: expected a whole number"):
                client.infer(f"{model}_classify", [tensor], parameters={"top": top})


@pytest.mark.parametrize("model", MODELS)
def test_base64_text_in_json(
    model: str, server: TritonServer, local: dict[str, BundleClassifier], tmp_path: Path
) -> None:
    for image in (*PHOTOS, LARGE):
        body = {"IMAGE": base64.b64encode(image).decode(), "top": 2}
        answer = posted(server, f"{model}_classify/generate", body)
        outputs = {name: [answer[name]] for name in ("label", "probability", "index", "present") if name in answer}
        (expected,) = classified(local[model], tmp_path, [image], 2)
        require_equal(outputs, 0, expected, 2)
    (answer,) = posted(server, f"{model}_classify/infer", tensors(PHOTOS[0]))["outputs"][:1]
    assert answer["shape"][0] == 1
    logits = posted(server, f"{model}/generate", {"IMAGE": base64.b64encode(PHOTOS[0]).decode()})["logits"]
    np.testing.assert_allclose(logits, local[model].logits(PHOTOS[:1])[0], atol=1e-5)


def test_base64_as_clients_write_it(server: TritonServer, local: dict[str, BundleClassifier], tmp_path: Path) -> None:
    (expected,) = classified(local[SINGLE], tmp_path, PHOTOS[:1], 1)
    plain = base64.b64encode(PHOTOS[0]).decode()
    for text in (
        f"data:image/jpeg;base64,{plain}",
        base64.urlsafe_b64encode(PHOTOS[0]).decode().rstrip("="),
        base64.encodebytes(PHOTOS[0]).decode().replace("\n", "\r\n"),
    ):
        answer = posted(server, f"{SINGLE}_classify/generate", {"IMAGE": text, "top": 1})
        assert (answer["label"], answer["probability"]) == (expected[0].label, pytest.approx(expected[0].probability))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (base64.b64encode(PHOTOS[0]).decode() + "*", "begins as base64 text, but is not valid base64"),
        ("data:image/png,%89PNG", "begins as base64 text, but is not valid base64"),
        (base64.b64encode(PHOTOS[0][:-200]).decode(), "damaged or truncated"),
        (base64.b64encode(b"no image").decode(), "not a JPEG, PNG, WEBP or BMP image"),
    ],
    ids=["other characters", "not base64", "truncated image", "no image"],
)
def test_text_that_is_no_image(text: str, message: str, server: TritonServer) -> None:
    answer = posted(server, f"{SINGLE}_classify/generate", {"IMAGE": text}, status=400)
    assert message in answer["error"]


def tensors(image: bytes) -> dict[str, Any]:
    data = [base64.b64encode(image).decode()]
    return {"inputs": [{"name": "IMAGE", "shape": [1, 1], "datatype": "BYTES", "data": data}]}


def posted(server: TritonServer, path: str, body: dict[str, Any], *, status: int = 200) -> dict[str, Any]:
    answer = request(server.http_url, f"/v2/models/{path}", json.dumps(body).encode())
    assert answer.status == status, answer.body
    parsed: dict[str, Any] = answer.json()
    return parsed


# ---- several labels for an image -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for index in range(30):
        (folder / f"{index}.png").write_bytes(encoded(photo(32, 32, seed=index), "PNG"))
    return [folder / f"{index}.png" for index in range(30)]


@pytest.fixture(scope="module")
def logits(bundles: dict[str, Bundle], files: list[Path]) -> np.ndarray:
    """The logits (30, 10) of the multi-label network in PyTorch, float64."""
    manifest, weights = bundles[MULTI].manifest, bundles[MULTI].weights_path
    pixels = np.stack([manifest.image.pixels_from_bytes(file.read_bytes()) for file in files])
    return exact_logits(model_from_bundle(manifest, weights), manifest.image.tensor_from_pixels(pixels))


def probabilities_of(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


@pytest.fixture(scope="module")
def front(server: TritonServer) -> Iterator[FrontProcess]:
    with FrontProcess(FrontOptions(triton_url=server.http_url, models=(MULTI,)), None) as running:
        running.wait_ready()
        yield running


@pytest.mark.nightly
def test_the_server_gives_the_labels_of_pytorch(logits: np.ndarray, server: TritonServer, files: list[Path]) -> None:
    present = probabilities_of(logits) >= THRESHOLDS
    assert present.any(0).sum() > present.all(0).sum()
    for url in (server.grpc_url, server.http_url):
        with TritonClassifier(url, model=MULTI) as classifier:
            answers = classify_files(classifier, files, features=True)
            assert classifier.label_set.names[4:6] == ("x (4)", "x (5)")
        for row, expected, answer in zip(probabilities_of(logits), present, answers, strict=True):
            assert {guess.index for guess in answer.predictions if guess.present} == {*np.flatnonzero(expected)}
            assert answer.features is not None
            assert answer.features.ndim == 1
            for guess in answer.predictions:
                assert guess.probability == pytest.approx(row[guess.index], abs=1e-5)
                assert guess.threshold == THRESHOLDS[guess.index]


@pytest.mark.nightly
def test_the_classification_extension_keeps_repeated_labels_apart(server: TritonServer, files: list[Path]) -> None:
    images = np.array([[file.read_bytes()] for file in files[:4]], dtype=np.object_)
    with TritonConnection(server.grpc_url) as connection:
        best = connection.best_classes(MULTI, "IMAGE", images)
    assert [label for _, label in best] == [LABELS[index] for index, _ in best]


@pytest.mark.nightly
def test_the_page_shows_the_labels_and_their_thresholds(
    logits: np.ndarray, front: FrontProcess, files: list[Path]
) -> None:
    with open_chromium() as browser:
        page = browser.new_page()
        page.goto(front.url)
        page.set_input_files("#file", files[0])
        page.wait_for_selector("table")
        shown = page.locator("tbody th").all_inner_texts()
    for index, present in enumerate(probabilities_of(logits[0]) >= THRESHOLDS):
        assert (f"{LABELS[index]} (present, at least {100 * THRESHOLDS[index]:.1f} %)" in shown) == present
    assert any("(absent, below " in text for text in shown)


@pytest.mark.nightly
def test_parity_reports_map_and_f1_of_scikit_learn(
    logits: np.ndarray, bundles: dict[str, Bundle], server: TritonServer, files: list[Path], gmmvit: Gmmvit
) -> None:
    multi, folder = bundles[MULTI], files[0].parent
    thresholds = np.array(multi.manifest.label_set.threshold_logits)
    truth = logits + np.random.default_rng(0).normal(size=logits.shape) >= thresholds
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("file", *multi.manifest.label_set.names),
                *((path.name, *row.astype(int)) for path, row in zip(files, truth, strict=True)),
            ]
        )
    words = ("--data", f"table:{folder / 'table.csv'}", "--runner", "onnxruntime,triton-grpc", "--url", server.grpc_url)
    answer = gmmvit("parity", multi.path, *words, "--json", "--report", folder / "report.html")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    jsonschema.validate(report, json.loads(SCHEMA_PATH.read_text()))
    mixed = truth.any(0)
    expected = {
        "map": average_precision_score(truth[:, mixed], logits[:, mixed], average="macro"),
        "f1_macro": f1_score(truth, logits >= thresholds, average="macro", zero_division=0),
        "f1_micro": f1_score(truth, logits >= thresholds, average="micro", zero_division=0),
    }
    assert len(report["runners"]) == 2
    for runner in report["runners"]:
        checks = {check["name"]: check for check in runner["checks"]}
        assert checks["decisions"]["verdict"] == "passed"
        assert checks["decisions"]["summary"].startswith("the same labels on ")
        for who in ("pytorch", "runner"):
            assert checks["accuracy"]["details"]["measures"][who] == pytest.approx(expected, abs=1e-3)
    assert "macro F1" in (folder / "report.html").read_text()
