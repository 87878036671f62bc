"""A real Triton server: its answers, its refusals, and that it leaves no process or file."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import RepositoryError, RequestRejectedError, ServerError
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.installs import find_server, system_server
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import Repository, repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.inference.test_preprocess import encoded, photo
from tests.serving.commands import Serve, processes_naming, wait_gone
from tests.serving.shared import Running
from tests.waiting import wait_until

pytestmark = pytest.mark.integration
PROTOCOLS = ("grpc", "http")


def url_of(server: Running, protocol: str) -> str:
    return server.grpc_url if protocol == "grpc" else server.http_url


@pytest.fixture(params=PROTOCOLS)
def connection(request: pytest.FixtureRequest, server: Running) -> Iterator[TritonConnection]:
    with TritonConnection(url_of(server, request.param)) as opened:
        yield opened


def as_bytes(*images: bytes) -> np.ndarray:
    return np.array([[data] for data in images], dtype=np.object_)


class TestAnswers:
    @pytest.mark.first(1)
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_parity(self, protocol: str, server: Running, bundle: Bundle) -> None:
        with TritonRunner(bundle, url_of(server, protocol)) as runner:
            report = check_parity(bundle, [runner])
        assert report.passed, report.failures()
        assert report.runners[0].check("served").details["joined"] > 0

    def test_files_that_become_png_and_files_that_cannot(self, server: Running, tmp_path: Path) -> None:
        image = encoded(photo(60, 40), "TIFF")
        for name, data in (("a.tif", image), ("b.tif", image[:500])):
            (tmp_path / name).write_bytes(data)
        with TritonClassifier(url_of(server, PROTOCOLS[0])) as classifier:
            good, damaged = classify_files(classifier, [tmp_path / "a.tif", tmp_path / "b.tif"], top=1)
        assert len(good.predictions) == 1
        assert damaged.error.startswith("the TIFF image is damaged or truncated")


class TestRefusals:
    def test_the_bad_image_of_a_batch_is_named(self, connection: TritonConnection) -> None:
        good = encoded(photo(32, 32), "PNG")
        with pytest.raises(RequestRejectedError, match="image 1: the file is not a JPEG"):
            connection.infer("gmmvit", "IMAGE", as_bytes(good, b"bad", good))

    @pytest.mark.parametrize(
        "batch",
        [
            np.zeros((1, 31, 32, 3), np.uint8),
            np.zeros((1, 32, 32, 3), np.float32),
            np.zeros((9, 32, 32, 3), np.uint8),
            np.zeros((32, 32, 3), np.uint8),
            np.zeros((0, 32, 32, 3), np.uint8),
            np.zeros((0, 1), np.object_),
            as_bytes(*[encoded(photo(32, 32), "PNG")] * 9),
        ],
        ids=["shape", "dtype", "over the maximum", "no batch", "empty", "no images", "images over the maximum"],
    )
    def test_batches_that_do_not_fit(self, batch: np.ndarray, connection: TritonConnection) -> None:
        model, name = ("gmmvit", "IMAGE") if batch.dtype == np.object_ else ("gmmvit_network", "pixels")
        with pytest.raises(RequestRejectedError):
            connection.infer(model, name, batch)


class TestStarting:
    def start(self, repository: Path, **options: Any) -> None:
        server = TritonServer(repository, options=ServerOptions(**{**FREE_PORTS, **options}))
        try:
            server.start()
        finally:
            server.stop()

    @pytest.mark.nightly
    def test_a_network_that_does_not_load(self, repository: Repository, tmp_path: Path) -> None:
        broken = tmp_path / "models"
        shutil.copytree(repository.path, broken)
        (broken / "gmmvit_network" / "1" / "model.onnx").write_bytes(b"no graph")
        with pytest.raises(ServerError, match=r"gmmvit_network: .*Unable to read the model") as caught:
            self.start(broken)
        assert "\n  gmmvit_network: " in str(caught.value)
        wait_gone(str(broken))

    def test_a_backend_it_lacks(self, bundle: Bundle, tmp_path: Path) -> None:
        options = RepositoryOptions(backend="onnxruntime")
        written = repository_from_bundle(bundle, tmp_path / "models", options)
        if "onnxruntime" in find_server().backend_names:
            pytest.skip("this server has the onnxruntime backend")
        with pytest.raises(RepositoryError, match=r"needs the onnxruntime backend; .* has: python") as caught:
            self.start(written.path)
        assert "gmmvit repository BUNDLE --backend NAME" in caught.value.hint

    def test_time_that_runs_out(self, repository: Repository) -> None:
        with pytest.raises(ServerError, match="not ready after 0 s"):
            self.start(repository.path, start_timeout_s=0.01)


class TestStopping:
    def test_an_interrupt_ends_the_server_of_a_bundle_cleanly(
        self, bundle: Bundle, repository: Repository, tmp_path: Path
    ) -> None:
        """tests/serving/test_gateway.py sends SIGTERM."""
        with Serve(Path(shutil.copytree(bundle.path, tmp_path / "bundle")), "--verbose") as running:
            where = running.ready()
            assert where["runner"] == repository.runner  # as the configuration of its repository states
            with TritonRunner(bundle, where["http"]) as runner:
                assert runner.run(bundle.golden()[0]).shape == (8, 10)
            assert len(processes_naming(where["repository"])) >= 3  # tritonserver and two stubs
            running.process.send_signal(signal.SIGINT)
            status, errors = running.end()
        assert status == 0, errors
        assert "· serve: start the server and load the models" in errors
        assert "Traceback" not in errors
        wait_gone(where["repository"])
        assert not Path(where["repository"]).exists()

    @pytest.mark.nightly
    def test_a_signal_while_it_starts(self, serve: Callable[..., Serve]) -> None:
        running = serve()
        wait_until(lambda: len(processes_naming(str(running.path))) >= 2, "two processes of the service")
        running.process.send_signal(signal.SIGTERM)
        status, errors = running.end()
        assert "Traceback" not in errors
        assert status in (0, 143)

    @pytest.mark.nightly
    def test_killing_gmmvit_ends_triton(
        self, serve: Callable[..., Serve], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next start removes what is left."""
        folders = tmp_path / "temporary"
        folders.mkdir()
        monkeypatch.setenv("TMPDIR", str(folders))
        running = serve()
        running.ready()
        running.process.kill()
        running.process.communicate()
        wait_gone(str(running.path))
        left = {folder.name for folder in folders.glob("gmmvit-run-*")}
        assert left
        serve().ready()
        there = {folder.name for folder in folders.glob("gmmvit-run-*")}
        assert there
        assert not there & left
        assert [region for name in left for region in Path("/dev/shm").glob(f"{name}*")] == []


class TestInstalls:
    def test_named_server_must_be_a_program(self, tmp_path: Path) -> None:
        (tmp_path / "tritonserver").write_text("text")
        for path in (tmp_path / "tritonserver", tmp_path / "nowhere"):
            with pytest.raises(ServerError, match="expected an executable tritonserver program"):
                find_server(path)

    def test_a_server_on_path_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        binary = tmp_path / "bin" / "tritonserver"
        binary.parent.mkdir()
        binary.write_text("#!/bin/sh\n")
        binary.chmod(0o755)
        (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
        monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)
        installed = find_server()
        assert (installed.kind, installed.binary) == ("system", binary)
        assert installed.best_backend == "onnxruntime"
        assert system_server(binary).backends == tmp_path / "backends"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_another_bundle_on_the_server_is_noticed(
    protocol: str, server: Running, tensor_bundles: dict[str, Bundle]
) -> None:
    with pytest.raises(Exception, match="serves gmmvit_network from bundle"):
        TritonRunner(tensor_bundles["vit_gmm"], url_of(server, protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_ask_this_machine_without_a_proxy(
    protocol: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with TritonConnection(url_of(server, protocol), timeout_s=10) as opened:
        assert opened.model("gmmvit").label_set.labels[6] == "frog"


class _NotTriton(http.server.BaseHTTPRequestHandler):
    """Some other web server, which knows nothing of inference."""

    status, body = 200, b"<html>hello</html>"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.first(1)
@pytest.mark.parametrize("status", [200, 404, 500])
@pytest.mark.parametrize("body", [b"<html>hello</html>", b"", b"[]"])
def test_a_server_that_is_no_triton(status: int, body: bytes) -> None:
    handler = type("Handler", (_NotTriton,), {"status": status, "body": body})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with TritonConnection(f"http://127.0.0.1:{other.server_port}") as opened, pytest.raises(ServerError):
                opened.model("gmmvit")
        finally:
            other.shutdown()
            thread.join()
