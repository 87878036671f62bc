"""``POST /embed`` and ``/v1/embeddings`` answer images with the features of a real Triton server, as PyTorch has them.

The programs of docs/pages/clients.md for features run against the same server, behind a gateway.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.runtimes.runners.eager import EagerRunner
from gmmvit_deploy.serving.front._app import front_app
from gmmvit_deploy.serving.front._triton import Model, Triton
from gmmvit_deploy.serving.front.options import BUNDLE_HEADER, RUNNER_HEADER, FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.gateway.gateway import Gateway
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.server import TritonServer
from tests.conftest import FREE_PORTS
from tests.documented import PAGES, blocks, commands
from tests.haproxy import needs_haproxy
from tests.inference.test_preprocess import encoded, photo
from tests.serving.gateways import BEARER, KEY, key_file
from tests.timm.test_to_triton import one_server

pytestmark = pytest.mark.integration
IMAGES = {"photo.png": encoded(photo(60, 40), "PNG"), "other.png": encoded(photo(40, 60, seed=1), "PNG")}
MAX_BYTES = 2**20
URIS = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in IMAGES.values()]
FILES = [("image", item) for item in IMAGES.items()]


@pytest.fixture(scope="module")
def server(
    both_bundle: Bundle, features_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    bundles = {"gmmvit": both_bundle, "backbone": features_bundle}
    with one_server(bundles, tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def front(server: TritonServer) -> Iterator[FrontProcess]:
    with FrontProcess(FrontOptions(triton_url=server.http_url, max_body_bytes=MAX_BYTES), None) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def features(both_bundle: Bundle) -> np.ndarray:
    """PyTorch's features of the images, float32 (2, D)."""
    pixels = np.stack([both_bundle.manifest.image.pixels_from_bytes(image) for image in IMAGES.values()])
    with EagerRunner(both_bundle) as runner:
        return runner.rows_all(pixels)["features"]


def close(actual: Any, expected: np.ndarray) -> None:
    assert np.shape(actual) == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def asked(url: str, path: str, **arguments: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", timeout=30, trust_env=False, **arguments)


def decoded(texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(base64.b64decode(text), "<f4") for text in texts]


def test_every_form_of_the_answer(front: FrontProcess, both_bundle: Bundle, features: np.ndarray) -> None:
    answer = asked(front.url, "/embed", files=FILES)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body.keys() == {"model", "bundle", "runner", "dimension", "features"}
    assert (body["model"], body["bundle"], body["dimension"]) == ("gmmvit", both_bundle.sha256, features.shape[1])
    assert (answer.headers[BUNDLE_HEADER], answer.headers[RUNNER_HEADER]) == (body["bundle"], body["runner"])
    close(decoded(body["features"]), features)
    close(asked(front.url, "/embed/?format=list", files=FILES).json()["features"], features)
    file = np.load(io.BytesIO(asked(front.url, "/embed?format=npy", content=IMAGES["photo.png"]).content))
    assert file.dtype == np.dtype("<f4")
    close(file, features[:1])


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_embeddings_in_the_form_of_openai(encoding: str | None, front: FrontProcess, features: np.ndarray) -> None:
    asks: dict[str, Any] = {"model": "gmmvit", "input": URIS}
    answer = asked(
        front.url, "/v1/embeddings", json=asks if encoding is None else {**asks, "encoding_format": encoding}
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"], body["usage"].keys()) == (
        "list",
        "gmmvit",
        {"prompt_tokens", "total_tokens"},
    )
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", 0), ("embedding", 1)]
    vectors = [item["embedding"] for item in body["data"]]
    close(decoded(vectors) if encoding == "base64" else vectors, features)
    others = {"input": URIS[1].replace("base64", "BASE64"), "encoding_format": None, "dimensions": features.shape[1]}
    (single,) = asked(front.url, "/v1/embeddings/", json={**asks, **others}).json()["data"]
    close(single["embedding"], features[1])


def document(text: str) -> dict[str, Any]:
    return {"path": "/v1/embeddings", "content": text, "headers": {"content-type": "application/json"}}


def openai(**changes: Any) -> dict[str, Any]:
    return document(json.dumps({"model": "gmmvit", "input": URIS, **changes}))


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another format": ({"path": "/embed?format=csv", "content": b"x"}, 400, "format: expected base64, list or npy"),
    "no JSON": ({"path": "/v1/embeddings", "content": b"x"}, 415, "expected application/json, got no type"),
    "broken JSON": (document("{"), 400, "not valid JSON"),
    "nested JSON": (document("[" * 99_999), 400, "a body with 99999 brackets and commas"),
    "a megabyte of lists": (  # 16 of them, parsed, would take 0.5 GB, and seconds in which nobody else is answered
        document('{"model":"gmmvit","input":[' + "[]," * 333_333 + "[]]}"),
        400,
        "input: expected 1 to 8 images as data URIs, got a body with 666670 brackets and commas",
    ),
    "too large": (document(" " * (MAX_BYTES + 1)), 413, f"the limit is {MAX_BYTES} bytes"),
    "another path": ({"path": "/v1/models", "content": b""}, 404, "/classify, /embed or /v1/embeddings"),
    "a list": ({"path": "/v1/embeddings", "json": []}, 400, "expected a JSON object"),
    "another model": (openai(model="clip"), 404, "model: expected 'gmmvit', got 'clip'"),
    "a number as model": (openai(model=5), 404, "model: expected 'gmmvit', got a number"),
    "no model": (document('{"input": "a cat"}'), 400, "model is missing"),
    "no input": (openai(input=None), 400, "input is missing"),
    "another encoding": (openai(encoding_format="hex"), 400, "encoding_format: expected float or base64"),
    "another dimension": (openai(dimensions=2), 400, "dimensions: expected 48, the only length"),
    "6,000 digits": (
        document('{"model": "gmmvit", "input": "", "dimensions": ' + "9" * 6000 + "}"),
        400,
        "dimensions: expected 48",
    ),
    "another option": (openai(size=2), 400, "'size': expected only input, model"),
    "text": (openai(input="a cat"), 400, "image 0: expected a data URI"),
    "tokens": (openai(input=[[1, 2]]), 400, "image 0: expected a data URI"),
    "nested input": (openai(input=[json.loads("[" * 100 + "]" * 100)]), 400, "data URI, such as"),
    "half a surrogate pair": (openai(input="data:image/png;base64,\ud800"), 400, "image 0: "),
    "nothing": (openai(input=[]), 400, "input: expected 1 to 8 images, got 0"),
    "no base64": (openai(input=[URIS[0], "data:image/png;base64,!"]), 400, "image 1: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, front: FrontProcess) -> None:
    arguments, status, reason = REFUSED[case]
    answer = asked(front.url, **arguments)
    error = answer.json()["error"]
    if arguments["path"] == "/v1/embeddings":
        assert error == {"message": error["message"], "type": "invalid_request_error", "param": None, "code": None}
        error = error["message"]
    assert (answer.status_code, reason in error) == (status, True), answer.text


def test_features_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON holds no infinity: a client learns that the server failed."""

    async def model(self: Triton, name: str) -> Model:
        labels = LabelSet.from_parameters({})
        return Model(
            name=name, label_set=labels, bundle="", runner="", max_batch=1, max_group=1, outputs={"features": 2}
        )

    async def answers(self: Triton, model: str, images: Any, outputs: Any) -> dict[str, np.ndarray]:
        return {"features": np.array([[1, np.inf]], np.float32)}

    monkeypatch.setattr(Triton, "model", model)
    monkeypatch.setattr(Triton, "answers", answers)
    app = front_app(FrontOptions(triton_url="http://127.0.0.1:1"), None)
    with TestClient(app, base_url="http://localhost") as client:
        for arguments in (
            {"url": "/embed", "content": b"x"},
            {"url": "/v1/embeddings", "json": {"model": "gmmvit", "input": URIS[0]}},
        ):
            answer = client.post(**arguments)
            assert (answer.status_code, "features that are not finite" in answer.text) == (502, True)


def test_a_model_without_logits_names_the_other_path(server: TritonServer, features_bundle: Bundle) -> None:
    with FrontProcess(FrontOptions(triton_url=server.http_url, models=("backbone",)), None) as front:
        front.wait_ready()
        refused = asked(front.url, "/classify", content=IMAGES["photo.png"])
        page = httpx.get(front.url, trust_env=False)  # the page asks /classify
        for answer, status in ((refused, 400), (page, 404)):
            assert (answer.status_code, "POST to /embed" in answer.json()["error"]) == (status, True)
        (vector,) = asked(front.url, "/embed?format=list", content=IMAGES["photo.png"]).json()["features"]
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


@pytest.fixture
def reader(server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The reader's folder, with the variables of the page; yields the address of a gateway with keys."""
    for name, image in IMAGES.items():
        (tmp_path / name).write_bytes(image)
    (tmp_path / "key.txt").write_text(f"{KEY}\n")
    gateway = Gateway(GatewaySettings(keys=key_file(tmp_path)), **FREE_PORTS)
    with FrontProcess(FrontOptions(triton_url=server.http_url), gateway.front_secret) as behind:
        behind.wait_ready()
        gateway.start(server, front=behind.front)
        monkeypatch.setenv("GMMVIT_URL", gateway.http_url)
        monkeypatch.setenv("GMMVIT_KEY_FILE", "key.txt")
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.chdir(tmp_path)
        yield gateway.http_url
        gateway.stop()


OPENAI_REFUSALS = """
import openai

for api_key in (client.api_key, "unknown"):
    try:
        client.with_options(api_key=api_key).embeddings.create(model="gmmvit", input="a cat")
    except openai.APIStatusError as error:
        print(error.body["message"])
"""


def run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on PATH")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_haproxy
def test_the_programs_of_the_page(reader: str, features: np.ndarray) -> None:
    page = PAGES / "clients.md"
    examples = [*blocks(page, page.read_text(encoding="utf-8"))]
    console, python, javascript = (
        [block for block in examples if (block.test, block.language) == ("tests/serving/test_embed.py", language)]
        for language in ("console", "python", "javascript")
    )
    python, (of_openai,) = python[:1], python[1:]
    as_json, as_file = (
        command.text.replace("https://HOST:8000", reader) for each in console for command in commands(each)
    )
    close(decoded(json.loads(run("bash", "-c", as_json))["features"]), features)
    run("bash", "-c", as_file)
    close(np.load("features.npy"), features[:1])
    first, second = features.astype(np.float64)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    for program, (block,) in ({"embed.py": python, "embed.mjs": javascript}).items():
        Path(program).write_text(block.text)
        runner = sys.executable if program.endswith("py") else "node"
        assert float(run(runner, program, *IMAGES)) == pytest.approx(cosine, abs=1e-4)
    shown = run(sys.executable, "-c", of_openai.text.replace("https://HOST:8000", reader) + OPENAI_REFUSALS)
    assert shown.splitlines()[:2] == [f"{position} {features.shape[1]}" for position in (0, 1)]
    assert "image 0: expected a data URI" in shown.splitlines()[2]  # of the front
    assert "KEY is missing, or the key is unknown" in shown.splitlines()[3]  # of the gateway
    for path, arguments in (("/embed", {"content": b"x"}), ("/v1/embeddings", {"json": {}})):
        assert asked(reader, path, **arguments).status_code == 401
        assert httpx.get(f"{reader}{path}", headers=BEARER, trust_env=False).status_code == 404
