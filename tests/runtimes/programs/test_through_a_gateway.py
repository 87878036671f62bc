"""Clients through a real gateway before a real server: TLS, keys, and each refusal as an error of its own."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bench.waterfall import waterfall
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import KeyRefusedError, NotOfferedError, OverloadError, RequestRejectedError, ServerError
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.access import NO_ACCESS, Access, open_access
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtimes.runners.open import open_runner
from tests.certificates import self_signed
from tests.haproxy import SmallGateway, held, needs_haproxy, small_gateway
from tests.serving.shared import Running
from tests.waiting import wait_until

pytestmark = [needs_haproxy, pytest.mark.integration]
PROTOCOLS = ("http", "grpc")
MAX_BYTES = 8000
"""Of the narrow gateway: two golden images, but not eight."""


@pytest.fixture(scope="module")
def gateway(server: Running) -> Iterator[SmallGateway]:
    with small_gateway(server.http_port, server.grpc_port) as running:
        yield running


@pytest.fixture(scope="module")
def narrow(server: Running) -> Iterator[SmallGateway]:
    """A gateway with a place for a single request, a wait of 100 ms and small bodies."""
    with small_gateway(server.http_port, server.grpc_port, maxconn=1, queue_ms=100, most_bytes=MAX_BYTES) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, bundle: Bundle) -> Path:
    """A folder of eight golden images as PNG files, named by row."""
    (tmp_path / "images").mkdir()
    for row, pixels in enumerate(bundle.golden()[0]):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{row}.png")
    return tmp_path / "images"


def access(gateway: SmallGateway) -> Access:
    return open_access(key_file=gateway.key_file, ca=gateway.certificate.certificate)


def connected(gateway: SmallGateway, protocol: str) -> TritonConnection:
    return TritonConnection(gateway.url(protocol), access=access(gateway), timeout_s=10)


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestAllowed:
    @pytest.mark.first(1)
    def test_parity(self, protocol: str, gateway: SmallGateway, bundle: Bundle) -> None:
        """The gateway offers neither the server's version nor its statistics, and over HTTP no preprocessing model."""
        with open_runner(f"triton-{protocol}", bundle, url=gateway.url(protocol), access=access(gateway)) as runner:
            report = check_parity(bundle, [runner])
        assert not report.failed, report.failures()
        (judged,) = report.runners
        assert judged.provenance["server"] == f"Triton, version not offered, at {gateway.url(protocol)}"
        assert judged.check("preprocessing").verdict == ("undecided" if protocol == "http" else "passed")
        served = judged.check("served")
        assert served.verdict == "undecided"
        assert "does not offer its statistics" in served.reasons[0]
        assert served.details["executions"] is None
        assert served.details["requests"] == 160

    @pytest.mark.first(1)
    def test_bench_has_no_parts_of_a_request(self, protocol: str, gateway: SmallGateway, bundle: Bundle) -> None:
        name, pixels = f"triton-{protocol}", bundle.golden()[0]
        with open_runner(name, bundle, url=gateway.url(protocol), access=access(gateway)) as runner:
            network, decoding = waterfall(bundle, [runner], pixels, pixels)
        for step in (network, decoding):
            assert step.parts.keys() == {"unexplained"}
            assert step.parts["unexplained"] > 0


def refused(url: str, access: Access) -> ServerError:
    with TritonConnection(url, access=access, timeout_s=5) as connection, pytest.raises(ServerError) as caught:
        connection.model("gmmvit")
    return caught.value


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestKeys:
    def test_no_key(self, protocol: str, gateway: SmallGateway) -> None:
        error = refused(gateway.url(protocol), open_access(ca=gateway.certificate.certificate))
        assert isinstance(error, KeyRefusedError)
        assert f"{gateway.url(protocol)} requires a key: no such key" in str(error)
        assert "--key-file FILE" in error.hint
        assert "GMMVIT_KEY_FILE" in error.hint

    def test_a_key_that_the_server_does_not_know(self, protocol: str, gateway: SmallGateway, tmp_path: Path) -> None:
        (tmp_path / "old.txt").write_text("last-year")
        other = open_access(key_file=tmp_path / "old.txt", ca=gateway.certificate.certificate)
        error = refused(gateway.url(protocol), other)
        assert isinstance(error, KeyRefusedError)
        assert f"refuses the key of {tmp_path / 'old.txt'}: no such key" in str(error)
        assert "last-year" not in str(error) + error.hint


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestTls:
    def test_certificates_that_are_not_trusted(self, protocol: str, gateway: SmallGateway, tmp_path: Path) -> None:
        """Of an unknown authority, of another one than --ca states, and of another host."""
        url = gateway.url(protocol)
        other = open_access(ca=self_signed(tmp_path, "other").certificate)
        elsewhere = url.replace("127.0.0.1", "localhost")
        for address, trusted in ((url, NO_ACCESS), (url, other), (elsewhere, access(gateway))):
            error = refused(address, trusted)
            assert f"the certificate of {address} is not trusted: " in str(error)
            assert "--ca FILE" in error.hint
            assert "must name the host of the address" in error.hint

    def test_tls_to_a_server_without_tls(self, protocol: str, server: Running) -> None:
        plain = server.http_url if protocol == "http" else server.grpc_url
        error = refused(plain.replace("://", "s://"), NO_ACCESS)
        assert "does not use TLS" in f"{error} {error.hint}"
        assert "type http://" in error.hint

    def test_no_tls_to_a_server_with_tls(self, protocol: str, gateway: SmallGateway) -> None:
        error = refused(gateway.url(protocol).replace("s://", "://"), NO_ACCESS)
        assert "no Triton server answers at " in str(error)
        assert "if the server uses TLS, type https:// or grpcs://" in error.hint


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestNotOffered:
    def test_statistics_and_version(self, protocol: str, gateway: SmallGateway) -> None:
        with connected(gateway, protocol) as connection:
            with pytest.raises(NotOfferedError, match=r"does not offer the statistics of gmmvit: no such path"):
                connection.counts("gmmvit")
            with pytest.raises(NotOfferedError, match=r"does not offer the version of the server: no such path"):
                connection.version()

    def test_a_model_that_the_server_does_not_have(self, protocol: str, gateway: SmallGateway) -> None:
        """Over HTTP, the list of paths has the models' names; over gRPC, the server itself answers."""
        with connected(gateway, protocol) as connection, pytest.raises(ServerError) as caught:
            connection.model("resnet")
        assert isinstance(caught.value, NotOfferedError) == (protocol == "http")
        assert "resnet" in str(caught.value)
        assert "--served-name" in caught.value.hint


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestTooLarge:
    def test_a_batch(self, protocol: str, narrow: SmallGateway, bundle: Bundle) -> None:
        """Over gRPC, size and overload have the same status, RESOURCE_EXHAUSTED."""
        with (
            connected(narrow, protocol) as connection,
            pytest.raises(
                RequestRejectedError, match=r"because it is too large: (too big|larger than allowed)"
            ) as caught,
        ):
            connection.infer("gmmvit_network", "pixels", bundle.golden()[0])
        assert "fewer or smaller images" in caught.value.hint

    def test_a_body_far_beyond_the_limit(self, protocol: str, narrow: SmallGateway) -> None:
        """HAProxy 2.6 answers before it has read the body: over HTTP it closes the connection, in HTTP/2 the stream."""
        with connected(narrow, protocol) as connection, pytest.raises(ServerError) as caught:
            connection.infer("gmmvit_network", "pixels", np.zeros((2000, 32, 32, 3), np.uint8))
        assert "no Triton server answers" not in str(caught.value)
        assert "too large" in str(caught.value)

    def test_classify_sends_the_images_one_by_one(
        self, protocol: str, narrow: SmallGateway, folder: Path, bundle: Bundle
    ) -> None:
        files = sorted(folder.iterdir())
        with TritonClassifier(narrow.url(protocol), access=access(narrow)) as classifier:
            answers = classify_files(classifier, files, top=1, batch=8, concurrency=1)
        assert [answer.predictions[0].index for answer in answers] == bundle.golden()[1].argmax(1).tolist()


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "grpc503"])
def test_overload_is_no_missing_server(protocol: str, narrow: SmallGateway, bundle: Bundle) -> None:
    """grpc503: HTTP's status 503 without a gRPC status, which gRPC's client reports as UNAVAILABLE."""
    pixels = bundle.golden()[0][:1]
    with connected(narrow, protocol) as connection:
        assert connection.infer("gmmvit_network", "pixels", pixels).shape == (1, 10)
        with held(narrow, protocol.removesuffix("503")), pytest.raises(OverloadError) as caught:
            connection.infer("gmmvit_network", "pixels", pixels)
        assert connection.infer("gmmvit_network", "pixels", pixels).shape == (1, 10)
    assert f"{narrow.url(protocol)} answers, but refuses requests for now" in str(caught.value)
    assert "no Triton server answers" not in str(caught.value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
class TestRetries:
    @pytest.mark.first(1)
    def test_classify_waits_for_a_place(
        self, protocol: str, narrow: SmallGateway, folder: Path, bundle: Bundle
    ) -> None:
        indices: list[int] = []

        def classify() -> None:
            with TritonClassifier(narrow.url(protocol), access=access(narrow), retry_s=20) as classifier:
                (answer,) = classify_files(classifier, [folder / "0.png"], top=1)
            indices.append(answer.predictions[0].index)

        thread = threading.Thread(target=classify)
        with held(narrow, protocol):
            before = narrow.requests(protocol)
            thread.start()
            wait_until(lambda: narrow.requests(protocol) >= before + 2, "a refused request that is asked again")
            assert not indices
        thread.join(20)
        assert indices == [int(bundle.golden()[1][0].argmax())]

    @pytest.mark.first(1)
    def test_classify_gives_up_at_the_deadline(self, protocol: str, narrow: SmallGateway) -> None:
        with held(narrow, protocol):
            before = narrow.requests(protocol)
            with pytest.raises(OverloadError, match=r"refused \d+ times within 2\.5 s"):
                TritonClassifier(narrow.url(protocol), access=access(narrow), retry_s=2.5)
            assert narrow.requests(protocol) - before >= 2

    def test_runners_see_every_refusal(self, protocol: str, narrow: SmallGateway, bundle: Bundle) -> None:
        name, pixels = f"triton-{protocol}", bundle.golden()[0][:1]
        with open_runner(name, bundle, url=narrow.url(protocol), access=access(narrow)) as runner:
            with held(narrow, protocol):
                before = narrow.requests(protocol)
                for _ in range(3):
                    with pytest.raises(OverloadError):
                        runner.run(pixels)
                assert narrow.requests(protocol) - before == 3
            assert runner.run(pixels).shape == (1, 10)


class TestCommandLine:
    @pytest.mark.first(1)
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_options(
        self,
        protocol: str,
        gateway: SmallGateway,
        folder: Path,
        gmmvit: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        trusted = ("--key-file", gateway.key_file, "--ca", gateway.certificate.certificate)
        answer = gmmvit("classify", folder, "--url", gateway.url(protocol), *trusted)
        assert answer.returncode == 0, answer.stderr
        assert len(answer.stdout.splitlines()) == 8

    def test_variables(
        self,
        gateway: SmallGateway,
        folder: Path,
        bundle: Bundle,
        monkeypatch: pytest.MonkeyPatch,
        gmmvit: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        monkeypatch.setenv("GMMVIT_URL", gateway.http_url)
        monkeypatch.setenv("GMMVIT_KEY_FILE", str(gateway.key_file))
        monkeypatch.setenv("GMMVIT_CA", str(gateway.certificate.certificate))
        before = gateway.requests("http")
        answer = gmmvit("classify", folder / "0.png")
        assert answer.returncode == 0, answer.stderr
        assert gateway.requests("http") > before
        assert gmmvit("classify", folder / "0.png", "--bundle", bundle.path).returncode == 0  # asks no server
        served = gmmvit("parity", bundle.path, "--runner", "onnxruntime,triton-http")
        assert served.returncode == 0, served.stderr + served.stdout
