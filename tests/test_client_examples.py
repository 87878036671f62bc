"""The programs of docs/pages/clients.md, run in their languages against the service of ``gmmvit serve --gateway``.

The alert rules of docs/pages/operate.md are checked against the metrics of the same service.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier
from gmmvit_deploy.serving.front.options import FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.gateway.files import ALERTS
from gmmvit_deploy.serving.gateway.gateway import Gateway
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import Service
from tests.certificates import Certificate, self_signed
from tests.cli.terminal import Gmmvit, done
from tests.conftest import FREE_PORTS
from tests.documented import PAGES, Block, blocks, commands
from tests.haproxy import needs_haproxy
from tests.inference.test_preprocess import encoded, photo
from tests.serving.gateways import KEY, key_file, request
from tests.serving.shared import Running

pytestmark = [needs_haproxy, pytest.mark.integration]
PAGE = PAGES / "clients.md"
TIMEOUT_S = 60


def examples(language: str) -> list[Block]:
    on_page = [block for block in blocks(PAGE, PAGE.read_text(encoding="utf-8")) if block.language == language]
    return [block for block in on_page if block.test == "tests/test_client_examples.py"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def service(
    repository: Repository, certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """HAProxy with TLS and keys, the front and Triton, as ``gmmvit serve --gateway`` runs them."""
    settings = GatewaySettings(
        keys=key_file(tmp_path_factory.mktemp("keys")),
        tls_cert=certificate.certificate,
        tls_key=certificate.private_key,
        access_log=tmp_path_factory.mktemp("log") / "access.log",
    )
    with Service(ServerOptions(**FREE_PORTS), settings) as running:
        running.start(TritonServer(repository.path, options=running.server_options), cancelled=lambda: False)
        yield running


@pytest.fixture
def folder(
    tmp_path: Path, service: Service, certificate: Certificate, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The reader's folder: an image, pixels, a key and a certificate, and the variables of the page."""
    (tmp_path / "photo.png").write_bytes(encoded(photo(60, 40), "PNG"))
    (tmp_path / "other.png").write_bytes(encoded(photo(40, 60, seed=1), "PNG"))
    (tmp_path / "pixels.bin").write_bytes(bundle.golden()[0][0].tobytes())
    (tmp_path / "key.txt").write_text(f"{KEY}\n")
    shutil.copy(certificate.certificate, tmp_path / "ca.pem")
    for name, value in {
        "GMMVIT_URL": service.http_url,
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


@pytest.fixture(scope="module")
def addresses(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of ``/classify`` without TLS: behind a gateway, and alone."""
    gateway = Gateway(GatewaySettings(keys=key_file(tmp_path_factory.mktemp("keys"))), **FREE_PORTS)
    options = FrontOptions(triton_url=server.http_url)
    with FrontProcess(options, gateway.front_secret) as behind, FrontProcess(options, None) as alone:
        for front in (behind, alone):
            front.wait_ready()
        gateway.start(server, front=behind.front)
        yield {"gateway": gateway.http_url, "alone": alone.url}
        gateway.stop()


def logits_of(bundle: Bundle, *images: Path) -> np.ndarray:
    with BundleClassifier(bundle, runner="openvino") as classifier:
        return np.stack(classifier.logits([image.read_bytes() for image in images]))


@pytest.fixture
def expected(folder: Path, bundle: Bundle) -> dict[str, float]:
    """Label → probability of the three likeliest classes of the photo."""
    (logits,) = logits_of(bundle, folder / "photo.png")
    return {guess.label: guess.probability for guess in bundle.manifest.label_set.predictions(logits, 3)}


@pytest.fixture
def largest(bundle: Bundle) -> str:
    """What the programs print about the pixels."""
    return f"largest logit: {bundle.golden()[1][0].argmax()}"


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program} on PATH")
    return path


def labels_in(answer: str) -> list[list[str]]:
    """Return the labels of each image in an answer of /classify."""
    return [[guess["label"] for guess in guesses] for guesses in json.loads(answer)["predictions"]]


def check_lines(output: str, expected: dict[str, float], largest: str) -> None:
    *guesses, last = output.splitlines()
    assert last == largest
    printed = {label: float(probability) for label, probability, *_ in map(str.split, guesses)}
    assert list(printed) == list(expected)
    assert printed == pytest.approx(expected, abs=6e-4)


def test_curl(folder: Path, service: Service, bundle: Bundle, expected: dict[str, float]) -> None:
    require("curl")
    classify, several, infer = (command.text for block in examples("console")[:3] for command in commands(block))
    address = service.http_url.removeprefix("https://")
    answer = run("bash", "-c", classify.replace("HOST:8000", address))
    assert json.loads(answer)["bundle"] == bundle.sha256
    assert labels_in(answer) == [list(expected)]
    of_both = json.loads(run("bash", "-c", several.replace("HOST:8000", address)))["predictions"]
    logits = logits_of(bundle, folder / "photo.png", folder / "other.png")
    assert [[guess["index"] for guess in guesses] for guesses in of_both] == [[row.argmax()] for row in logits]
    run("bash", "-c", infer.replace("HOST:8000", address))
    tensor = (folder / "logits.bin").read_bytes()[-40:]
    np.testing.assert_allclose(np.frombuffer(tensor, "<f4"), bundle.golden()[1][0], atol=1e-5)


def test_curl_without_a_gateway(folder: Path, server: Running, bundle: Bundle, expected: dict[str, float]) -> None:
    require("curl")
    generate, infer = (
        command.text.replace("http://localhost:8000", server.http_url)
        for block in examples("console")[3:5]
        for command in commands(block)
    )
    answer = json.loads(run("bash", "-c", generate))
    (documented,) = (block for block in blocks(PAGE, PAGE.read_text(encoding="utf-8")) if "model_version" in block.text)
    assert answer.keys() == json.loads(documented.text).keys()
    assert answer["label"] == list(expected)
    assert answer["probability"] == pytest.approx([*expected.values()], abs=1e-5)
    run("bash", "-c", infer)
    binary = (folder / "answer.bin").read_bytes()
    for label in expected:
        assert len(label).to_bytes(4, "little") + label.encode() in binary


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("address", ["gateway", "alone"])
def test_clients_that_offer_http_2(
    address: str, addresses: dict[str, str], folder: Path, expected: dict[str, float]
) -> None:
    require("curl")
    (classify,) = (command.text for command in commands(examples("console")[0]))
    classify = classify.replace("https://HOST:8000", addresses[address]).replace("curl", "curl --silent --http2")
    answers = [run("bash", "-c", classify)]
    # What Java's HttpClient sends by default, for two requests on a connection; each head arrives in two pieces.
    host, port = addresses[address].removeprefix("http://").split(":")
    image = (folder / "photo.png").read_bytes()
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        for _ in range(2):
            head = f"POST /classify?top=3 HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n{UPGRADE}"
            connection.sendall(head[:-30].encode())
            time.sleep(0.05)
            connection.sendall(f"{head[-30:]}Content-Length: {len(image)}\r\n\r\n".encode() + image)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 200
            answers.append(answer.read().decode())
    assert [labels_in(answer) for answer in answers] == [[list(expected)]] * 3


@pytest.mark.parametrize("address", ["gateway", "alone"])
def test_a_slash_at_the_end_and_more_classes_than_there_are(
    address: str, addresses: dict[str, str], folder: Path
) -> None:
    image = (folder / "photo.png").read_bytes()
    answer = request(addresses[address], "/classify/?top=50", image)
    assert answer.status == 200
    assert len(answer.json()["predictions"][0]) == 10
    for method, path in (("POST", "/classify/x"), ("POST", "//classify"), ("GET", "/classify/")):
        refused = request(addresses[address], path, image if method == "POST" else None, method=method)
        assert refused.status in (404, 405)
        assert refused.json()["error"]


def test_gmmvit(folder: Path, service: Service, expected: dict[str, float], gmmvit: Gmmvit) -> None:
    (command,) = commands(examples("console")[-1])
    words = command.text.replace("https://HOST:8000", service.http_url).split()[1:]
    answer = done(gmmvit(*words))
    assert answer.out.startswith(f"photo.png: {next(iter(expected))} ")


def test_python(folder: Path, expected: dict[str, float], largest: str) -> None:
    (folder / "classify.py").write_text(examples("python")[0].text)
    check_lines(run(sys.executable, "classify.py", "photo.png", "pixels.bin"), expected, largest)


def test_the_python_program_names_a_refusal(folder: Path) -> None:
    (folder / "classify.py").write_text(examples("python")[0].text)
    (folder / "key.txt").write_text("unknown")
    command = [sys.executable, "classify.py", "photo.png", "pixels.bin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("401: ")
    assert "the key is unknown" in done.stderr


def test_tritonclient(folder: Path, service: Service, bundle: Bundle) -> None:
    text = examples("python")[1].text
    text = text.replace("HOST:8001", f"127.0.0.1:{service.gateway.grpc_port}")
    text = text.replace("HOST:8000", f"127.0.0.1:{service.gateway.http_port}")
    (logits,) = logits_of(bundle, folder / "photo.png")
    printed = run(sys.executable, "-c", text)
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d*(?:e-?\d+)?", printed)]
    np.testing.assert_allclose(numbers, [*logits, *logits], atol=1e-4)


@pytest.mark.nightly
def test_javascript(folder: Path, expected: dict[str, float], largest: str) -> None:
    node = require("node")
    (folder / "classify.mjs").write_text(examples("javascript")[0].text)
    check_lines(run(node, "classify.mjs", "photo.png", "pixels.bin"), expected, largest)


@pytest.mark.nightly
def test_java(folder: Path, expected: dict[str, float], largest: str) -> None:
    java, keytool = require("java"), require("keytool")
    (folder / "Classify.java").write_text(examples("java")[0].text)
    store = ("-keystore", "trust.p12", "-storepass", "changeit")
    run(keytool, "-importcert", "-noprompt", "-alias", "service", "-file", "ca.pem", *store)
    trusted = ("-Djavax.net.ssl.trustStore=trust.p12", "-Djavax.net.ssl.trustStorePassword=changeit")
    answer, last = run(java, *trusted, "Classify.java", "photo.png", "pixels.bin").splitlines()
    assert (labels_in(answer), last) == ([list(expected)], largest)


@pytest.mark.nightly
@pytest.mark.parametrize("address", ["gateway", "alone"])
def test_java_without_tls(
    address: str, addresses: dict[str, str], folder: Path, expected: dict[str, float], largest: str
) -> None:
    """Java's HttpClient offers HTTP/2 only without TLS.  The endpoint alone takes no tensors."""
    java = require("java")
    (folder / "Classify.java").write_text(examples("java")[0].text)
    environment = {**os.environ, "GMMVIT_URL": addresses[address]}
    command = [java, "Classify.java", "photo.png", "pixels.bin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    answer, *others = done.stdout.splitlines() or [done.stderr]
    assert labels_in(answer) == [list(expected)]
    assert others == ([largest] if address == "gateway" else [])


@pytest.mark.nightly
def test_go(folder: Path, expected: dict[str, float], largest: str) -> None:
    go = require("go")
    (folder / "classify.go").write_text(examples("go")[0].text + "\n")
    run(go, "vet", "classify.go", env={**os.environ, "GO111MODULE": "off"})
    check_lines(run(go, "run", "classify.go", "photo.png", "pixels.bin"), expected, largest)


def values(service: Service, certificate: Certificate) -> dict[str, float]:
    """Return name and labels → value of every sample on the metrics port."""
    answer = request(service.metrics_url, "/metrics", ca=certificate.certificate)
    samples = (line.rpartition(" ") for line in answer.body.decode().splitlines() if not line.startswith("#"))
    return {sample: float(value) for sample, _, value in samples if sample}


def probed(samples: dict[str, float]) -> bool:
    return any(name.startswith("gmmvit_probes_total") for name in samples)


NOT_OF_EACH = {"gmmvit_rollouts_total", "gmmvit_rollout_running", "gmmvit_expected_answers_ratio"}
"""Metrics of a service with a state folder, and of a bundle that optimize judged: tests/serving reads them."""


@pytest.mark.nightly
def test_the_service_has_every_series_of_the_alert_rules(service: Service, certificate: Certificate) -> None:
    """Each selector of the rules selects samples, apart from the label that Prometheus adds and from a failed probe."""
    end = time.monotonic() + 60
    service.run(lambda: probed(values(service, certificate)) or time.monotonic() > end)
    samples = values(service, certificate)
    assert probed(samples), "not within 60 s: a probe"
    selectors = set(re.findall(r"\b((?:gmmvit|haproxy|nv)_\w+)\{([^}]*)\}", ALERTS.read_text(encoding="utf-8")))
    assert len(selectors) >= 20
    for name, labels in selectors:
        if name in NOT_OF_EACH:
            continue
        matching = [sample for sample in samples if re.match(rf"{name}(\{{|$)", sample)]
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', labels):
            if label == "job" or operator == "!=":
                continue
            pattern = value if operator == "=~" else re.escape(value)
            matching = [sample for sample in matching if re.search(rf'[{{,]{label}="(?:{pattern})"', sample)]
        assert matching, f"{name}{{{labels}}}"


def test_metrics_of_certificate_and_reload(service: Service, certificate: Certificate) -> None:
    expires_in_s = values(service, certificate)["gmmvit_gateway_certificate_expiry_seconds"] - time.time()
    assert 23 * 3600 < expires_in_s <= 24 * 3600
    keys = service.gateway.settings.keys
    text = keys.read_text()
    for content, failed in ((text + "broken\n", 1), (text, 0)):
        keys.write_text(content)
        service.gateway.reload()
        assert values(service, certificate)["gmmvit_gateway_reload_failed"] == failed
