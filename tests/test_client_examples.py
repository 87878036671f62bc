"""The programs of docs/pages/clients.md, run in their languages against a gateway with TLS and keys.

HAProxy and Triton are real. Behind /classify stands a small program of this file with the service's form of answer.
"""

from __future__ import annotations

import email
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.runners.classify import BundleClassifier
from gmmvit_deploy.serving.server import TritonServer
from tests.documented import PAGES, Block, blocks, commands
from tests.haproxy import SmallGateway, needs_haproxy, small_gateway
from tests.test_preprocess import encoded, photo

pytestmark = [needs_haproxy, pytest.mark.server, pytest.mark.process]
PAGE = PAGES / "clients.md"
TIMEOUT_S = 60


def examples(language: str) -> list[Block]:
    on_page = [block for block in blocks(PAGE, PAGE.read_text(encoding="utf-8")) if block.language == language]
    return [block for block in on_page if block.test == "tests/test_client_examples.py"]


def images_of(content_type: str, body: bytes) -> list[bytes]:
    """Return the body, or the parts of multipart/form-data."""
    if not content_type.startswith("multipart/form-data"):
        return [body]
    message = email.message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    return [bytes(part.get_payload(decode=True)) for part in message.walk() if not part.is_multipart()]


@pytest.fixture(scope="module")
def classify_port(bundle: Bundle) -> Iterator[int]:
    """The port of a program that answers POST /classify?top=N with the bundle's own predictions."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            body = self.rfile.read(int(self.headers["content-length"]))
            logits = classifier.logits(images_of(self.headers["content-type"], body))
            top = int(query["top"][0])
            predictions = [[guess.to_json() for guess in classifier.label_set.predictions(row, top)] for row in logits]
            answer = {"model": "gmmvit", "bundle": bundle.sha256, "predictions": predictions}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with (
        BundleClassifier(bundle, cpu_kernels=False) as classifier,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening,
    ):
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening.server_port
        listening.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def gateway(server: TritonServer, classify_port: int) -> Iterator[SmallGateway]:
    with small_gateway(server.http_port, server.grpc_port, front=classify_port) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, gateway: SmallGateway, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder: an image, pixels, a key and a certificate, and the variables of the page."""
    (tmp_path / "photo.png").write_bytes(encoded(photo(60, 40), "PNG"))
    (tmp_path / "other.png").write_bytes(encoded(photo(40, 60, seed=1), "PNG"))
    (tmp_path / "pixels.bin").write_bytes(bundle.golden()[0][0].tobytes())
    shutil.copy(gateway.key_file, tmp_path / "key.txt")
    shutil.copy(gateway.certificate.certificate, tmp_path / "ca.pem")
    for name, value in {
        "GMMVIT_URL": gateway.http_url,
        "GMMVIT_KEY_FILE": "key.txt",
        "SSL_CERT_FILE": "ca.pem",
        "NODE_EXTRA_CA_CERTS": "ca.pem",
        "CURL_CA_BUNDLE": "ca.pem",
    }.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def expected(folder: Path, bundle: Bundle) -> tuple[list[tuple[str, float]], int]:
    """((label, probability) of the three likeliest classes of the photo, the index of the pixels' largest logit)."""
    with BundleClassifier(bundle, cpu_kernels=False) as classifier:
        (logits,) = classifier.logits([(folder / "photo.png").read_bytes()])
    guesses = [(guess.label, guess.probability) for guess in bundle.manifest.label_set.predictions(logits, 3)]
    return guesses, int(bundle.golden()[1][0].argmax())


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program} on PATH")
    return path


def check_lines(output: str, expected: tuple[list[tuple[str, float]], int]) -> None:
    *guesses, largest = output.splitlines()
    assert largest == f"largest logit: {expected[1]}"
    assert [line.split()[0] for line in guesses] == [label for label, _ in expected[0]]
    for line, (_, probability) in zip(guesses, expected[0], strict=True):
        assert float(line.split()[1]) == pytest.approx(probability, abs=6e-4)


def test_every_language_has_a_program() -> None:
    assert {language: len(examples(language)) for language in ("console", "python", "javascript", "java", "go")} == {
        "console": 4,
        "python": 2,
        "javascript": 1,
        "java": 1,
        "go": 1,
    }


def test_curl(folder: Path, gateway: SmallGateway, bundle: Bundle, expected: Any) -> None:
    require("curl")
    classify, several, infer = (command.text for block in examples("console")[:3] for command in commands(block))
    address = gateway.http_url.removeprefix("https://")
    answer = json.loads(run("bash", "-c", classify.replace("HOST", address)))
    assert answer["bundle"] == bundle.sha256
    assert [guess["label"] for guess in answer["predictions"][0]] == [label for label, _ in expected[0]]
    of_both = json.loads(run("bash", "-c", several.replace("HOST", address)))["predictions"]
    with BundleClassifier(bundle, cpu_kernels=False) as classifier:
        logits = classifier.logits([(folder / name).read_bytes() for name in ("photo.png", "other.png")])
    assert [[guess["index"] for guess in guesses] for guesses in of_both] == [[row.argmax()] for row in logits]
    run("bash", "-c", infer.replace("HOST", address))
    tensor = (folder / "logits.bin").read_bytes()[-40:]
    np.testing.assert_allclose(np.frombuffer(tensor, "<f4"), bundle.golden()[1][0], atol=1e-5)


def test_gmmvit(
    folder: Path, gateway: SmallGateway, expected: Any, gmmvit: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (command,) = commands(examples("console")[3])
    words = command.text.replace("https://HOST", gateway.http_url).split()[1:]
    answer = gmmvit(*words)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"photo.png: {expected[0][0][0]} ")


def test_python(folder: Path, expected: Any) -> None:
    (folder / "classify.py").write_text(examples("python")[0].text)
    check_lines(run(sys.executable, "classify.py", "photo.png", "pixels.bin"), expected)


def test_the_python_program_names_a_refusal(folder: Path) -> None:
    (folder / "classify.py").write_text(examples("python")[0].text)
    (folder / "key.txt").write_text("unknown")
    done = subprocess.run(
        [sys.executable, "classify.py", "photo.png", "pixels.bin"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == '401: {"error": "no such key"}\n'


def test_tritonclient(folder: Path, gateway: SmallGateway, bundle: Bundle) -> None:
    text = examples("python")[1].text
    text = text.replace("HOST:GRPC_PORT", f"127.0.0.1:{gateway.port('grpc')}")
    text = text.replace('"HOST"', f'"127.0.0.1:{gateway.port("http")}"')
    with BundleClassifier(bundle, cpu_kernels=False) as classifier:
        (logits,) = classifier.logits([(folder / "photo.png").read_bytes()])
    printed = run(sys.executable, "-c", text)
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d*(?:e-?\d+)?", printed)]
    np.testing.assert_allclose(numbers, [*logits, *logits], atol=1e-4)


def test_javascript(folder: Path, expected: Any) -> None:
    node = require("node")
    (folder / "classify.mjs").write_text(examples("javascript")[0].text)
    check_lines(run(node, "classify.mjs", "photo.png", "pixels.bin"), expected)


def test_java(folder: Path, expected: Any) -> None:
    java, keytool = require("java"), require("keytool")
    (folder / "Classify.java").write_text(examples("java")[0].text)
    store = ("-keystore", "trust.p12", "-storepass", "changeit")
    run(keytool, "-importcert", "-noprompt", "-alias", "service", "-file", "ca.pem", *store)
    trusted = ("-Djavax.net.ssl.trustStore=trust.p12", "-Djavax.net.ssl.trustStorePassword=changeit")
    answer, largest = run(java, *trusted, "Classify.java", "photo.png", "pixels.bin").splitlines()
    assert [guess["label"] for guess in json.loads(answer)["predictions"][0]] == [label for label, _ in expected[0]]
    assert largest == f"largest logit: {expected[1]}"


def test_go(folder: Path, expected: Any) -> None:
    go = require("go")
    (folder / "classify.go").write_text(examples("go")[0].text + "\n")
    run(go, "vet", "classify.go", env={**os.environ, "GO111MODULE": "off"})
    check_lines(run(go, "run", "classify.go", "photo.png", "pixels.bin"), expected)
