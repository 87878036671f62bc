"""A server with a secret for its administration serves inferences to everybody, and the rest to those who know it."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest
import tritonclient.grpc

from gmmvit_deploy.serving.server import ADMIN_HEADER, ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.serving.stand_in import MODEL, infer_body, write_stand_in

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    models = write_stand_in(tmp_path_factory.mktemp("guarded") / "models")
    with TritonServer(models, options=ServerOptions(**FREE_PORTS, admin_secret="s3cret-_")) as running:  # noqa: S106
        yield running


def status(server: TritonServer, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@pytest.mark.integration
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/index"),
        ("GET", "/v2/logging"),
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", f"/v2/models/{MODEL}/stats"),
    ],
)
def test_http_needs_the_secret(method: str, path: str, guarded: TritonServer) -> None:
    assert status(guarded, method, path) == 403
    assert status(guarded, method, path, **{ADMIN_HEADER: "wrong"}) == 403
    assert status(guarded, method, path, **{ADMIN_HEADER: "s3cret-_"}) == 200


@pytest.mark.integration
def test_inferences_and_configurations_do_not(guarded: TritonServer) -> None:
    assert status(guarded, "POST", f"/v2/models/{MODEL}/infer", infer_body(1)) == 200
    assert status(guarded, "GET", f"/v2/models/{MODEL}/config") == 200
    assert status(guarded, "GET", "/v2/health/ready") == 200


@pytest.mark.integration
def test_grpc_needs_the_secret(guarded: TritonServer) -> None:
    client = tritonclient.grpc.InferenceServerClient(guarded.grpc_url.removeprefix("grpc://"))
    with pytest.raises(Exception, match="UNAVAILABLE"):
        client.get_inference_statistics(MODEL)
    metadata = {f"triton-grpc-protocol-{ADMIN_HEADER}": "s3cret-_"}
    assert client.get_inference_statistics(MODEL, headers=metadata).model_stats
    client.close()


def test_the_secret_is_not_in_the_text_of_the_options() -> None:
    assert "s3cret" not in repr(ServerOptions(admin_secret="s3cret"))  # noqa: S106
