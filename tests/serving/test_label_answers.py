"""The models ``<name>_classify`` of a real server: labels of photos, by every way in which clients ask."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.labels import Prediction
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier, classify_files
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.inference.test_preprocess import encoded, photo
from tests.serving.conftest import joined_repository
from tests.serving.gateways import request

pytestmark = pytest.mark.integration
LABELS = ("cat: big", "Bär 🐻", '"quoted\\"', "1:2:3", "x", "x", "a,b", "ship", "tab\there", "end")
THRESHOLDS = (0.5,) * 4 + (0.01,) * 6
MODELS = ("gmmvit", "multi")
PHOTOS = (encoded(photo(60, 40), "JPEG"), encoded(photo(40, 60, seed=1), "PNG"))
LARGE = encoded(photo(1200, 1000), "JPEG")
"""More pixels than the preprocessing model decodes itself."""


@pytest.fixture(scope="module")
def bundles(bundle: Bundle) -> dict[str, Bundle]:
    """Name of a model → the same network with other labels, single-label and multi-label."""
    single = replace(bundle, manifest=replace(bundle.manifest, labels=LABELS))
    multi = replace(bundle, manifest=replace(single.manifest, task="multi-label", thresholds=THRESHOLDS))
    return dict(zip(MODELS, (single, multi), strict=True))


@pytest.fixture(scope="module")
def server(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    models = joined_repository(tmp_path_factory.mktemp("labels"), bundles)
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


def classified(bundle: Bundle, folder: Path, images: Sequence[bytes], top: int = 5) -> list[tuple[Prediction, ...]]:
    """The predictions of ``gmmvit classify --bundle``."""
    files = [folder / f"{index}.img" for index in range(len(images))]
    for file, image in zip(files, images, strict=True):
        file.write_bytes(image)
    with BundleClassifier(bundle) as classifier:
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
    package: Any, model: str, server: TritonServer, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    images = (*PHOTOS, LARGE)
    tensor = package.InferInput("IMAGE", [3, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[image] for image in images], dtype=np.object_))
    url = server.grpc_url if package is tritonclient.grpc else server.http_url
    with package.InferenceServerClient(url.partition("://")[2]) as client:
        for top, parameters in ((5, None), (3, {"top": 3}), (10, {"top": 11})):
            answer = client.infer(f"{model}_classify", [tensor], parameters=parameters)
            names = ("label", "probability", "index", *(("present",) if model == "multi" else ()))
            outputs = {name: answer.as_numpy(name) for name in names}
            for row, expected in enumerate(classified(bundles[model], tmp_path, images, top)):
                require_equal(outputs, row, expected, top)
        only = [package.InferRequestedOutput("label")]
        assert client.infer(f"{model}_classify", [tensor], outputs=only).as_numpy("probability") is None
        for top in (0, "3", 2.5, True):
            with pytest.raises(tritonclient.utils.InferenceServerException, match="top: expected a whole number"):
                client.infer(f"{model}_classify", [tensor], parameters={"top": top})


@pytest.mark.parametrize("model", MODELS)
def test_base64_text_in_json(model: str, server: TritonServer, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    for image in (*PHOTOS, LARGE):
        body = {"IMAGE": base64.b64encode(image).decode(), "top": 2}
        answer = posted(server, f"{model}_classify/generate", body)
        outputs = {name: [answer[name]] for name in ("label", "probability", "index", "present") if name in answer}
        (expected,) = classified(bundles[model], tmp_path, [image], 2)
        require_equal(outputs, 0, expected, 2)
    (answer,) = posted(server, f"{model}_classify/infer", tensors(PHOTOS[0]))["outputs"][:1]
    assert answer["shape"][0] == 1
    logits = posted(server, f"{model}/generate", {"IMAGE": base64.b64encode(PHOTOS[0]).decode()})["logits"]
    with BundleClassifier(bundles[model]) as classifier:
        np.testing.assert_allclose(logits, classifier.logits(PHOTOS[:1])[0], atol=1e-5)


def test_base64_as_clients_write_it(server: TritonServer, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    (expected,) = classified(bundles["gmmvit"], tmp_path, PHOTOS[:1], 1)
    plain = base64.b64encode(PHOTOS[0]).decode()
    for text in (
        f"data:image/jpeg;base64,{plain}",
        base64.urlsafe_b64encode(PHOTOS[0]).decode().rstrip("="),
        base64.encodebytes(PHOTOS[0]).decode().replace("\n", "\r\n"),
    ):
        answer = posted(server, "gmmvit_classify/generate", {"IMAGE": text, "top": 1})
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
    answer = posted(server, "gmmvit_classify/generate", {"IMAGE": text}, status=400)
    assert message in answer["error"]


def tensors(image: bytes) -> dict[str, Any]:
    data = [base64.b64encode(image).decode()]
    return {"inputs": [{"name": "IMAGE", "shape": [1, 1], "datatype": "BYTES", "data": data}]}


def posted(server: TritonServer, path: str, body: dict[str, Any], *, status: int = 200) -> dict[str, Any]:
    answer = request(server.http_url, f"/v2/models/{path}", json.dumps(body).encode())
    assert answer.status == status, answer.body
    parsed: dict[str, Any] = answer.json()
    return parsed
