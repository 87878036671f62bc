"""Faults of Triton that NVIDIA has published: what is left of them behind a gateway, and without one.

docs/pages/protection.md lists the faults.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from gmmvit_deploy.serving.installs import wheel_server
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import TritonServer
from gmmvit_deploy.serving.service import Service
from tests.documented import PAGES, table
from tests.haproxy import needs_haproxy
from tests.serving.gateways import BEARER, KEY, Stub, grpc_request, request, running_service
from tests.serving.stand_in import MODEL, infer_body

pytestmark = pytest.mark.integration
INFER = "/v2/models/gmmvit_network/infer"
REGISTER = "/v2/systemsharedmemory/region/r/register"
OWN = re.compile(r"/dev/shm/(gmmvit-run-\S+)")


@pytest.fixture(scope="module")
def service(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(repository.path, tmp_path_factory.mktemp("faults")) as running:
        yield running


def own_region(pid: int) -> str:
    """Return the name of a region of shared memory that Triton's Python backend has mapped."""
    return OWN.findall(Path(f"/proc/{pid}/maps").read_text())[0]


def region_request(key: str) -> bytes:
    return json.dumps({"key": f"/{key}", "offset": 0, "byte_size": 64}).encode()


def with_region(message: Any) -> Any:
    """Let the input of a request come from the region ``r``, which `REGISTER` would have registered."""
    del message.raw_input_contents[:]
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
    return message


@needs_haproxy
@pytest.mark.parametrize("key", [KEY, None], ids=["key", "stranger"])
@pytest.mark.parametrize("path", [INFER, "/v2/models/gmmvit_network/generate", "/v2/logging", "/classify", "/metrics"])
def test_no_chunked_body_passes_the_gateway(path: str, key: str | None, service: Service) -> None:
    """CVE-2025-23310 and CVE-2025-23311: Triton took stack for each chunk."""
    pid = service.server.pid
    address = urlsplit(service.metrics_url if path == "/metrics" else service.http_url)
    head = [f"POST {path} HTTP/1.1", "Host: a", "Transfer-Encoding: chunked", "Connection: close"]
    if key:
        head.append(f"Authorization: {BEARER['Authorization']}")
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=20) as connection:
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + b"1\r\na\r\n" * 10_000 + b"0\r\n\r\n")
        status = connection.makefile("rb").readline().split()[1]
    refusals = {INFER: b"411", "/classify": b"411"}
    assert status == (refusals.get(path, b"404") if key else b"401")
    assert service.server.pid == pid
    assert request(service.http_url, "/v2/health/ready").status == 200


@needs_haproxy
def test_nobody_registers_memory_of_the_server_through_the_gateway(service: Service) -> None:
    """CVE-2025-23319 and CVE-2025-23334: the Python backend's own region, as input and output of a request."""
    region = own_region(service.server.pid)
    for key, status, code in ((KEY, 404, grpc.StatusCode.UNIMPLEMENTED), (None, 401, grpc.StatusCode.UNAUTHENTICATED)):
        assert request(service.http_url, REGISTER, region_request(region), key=key).status == status
        message = service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=f"/{region}", byte_size=64)
        with Stub(service.grpc_url, key=key) as stub:
            assert stub.code("SystemSharedMemoryRegister", message)[0] == code
    with Stub(service.grpc_url) as stub:
        pixels = np.zeros((1, 32, 32, 3), np.uint8)
        assert "shared memory region" in stub.code("ModelInfer", with_region(grpc_request("pixels", pixels)))[1]
        assert stub.call("ModelInfer", grpc_request("pixels", pixels))[0].outputs[0].name == "logits"


def test_nobody_registers_memory_of_a_server_without_a_gateway(stand_in: TritonServer) -> None:
    region = own_region(stand_in.pid)
    assert request(stand_in.http_url, REGISTER, region_request(region)).status == 403
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/repository/index"):
        assert request(stand_in.http_url, path, b"{}").status == 403
    message = service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=f"/{region}", byte_size=64)
    with Stub(stand_in.grpc_url) as stub:
        assert "restricted" in stub.code("SystemSharedMemoryRegister", message)[1]
    assert request(stand_in.http_url, f"/v2/models/{MODEL}/infer", infer_body(1)).status == 200
    assert request(stand_in.http_url, f"/v2/models/{MODEL}/stats").status == 200


@needs_haproxy
def test_no_stream_passes_the_gateway(service: Service) -> None:
    """CVE-2025-23322: a stream that is cancelled before it is processed."""
    with Stub(service.grpc_url) as stub:
        message = grpc_request("pixels", np.zeros((1, 32, 32, 3), np.uint8))
        stream = stub.service.ModelStreamInfer(iter([message]), metadata=stub.metadata, timeout=20)
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


@needs_haproxy
def test_a_request_for_very_many_outputs_is_an_error(service: Service) -> None:
    """CVE-2026-24146: a large number of outputs."""
    pid, message = service.server.pid, grpc_request("pixels", np.zeros((1, 32, 32, 3), np.uint8))
    for number in range(200_000):
        message.outputs.add(name=f"logits{number}")
    with Stub(service.grpc_url) as stub:
        assert stub.code("ModelInfer", message)[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert service.server.pid == pid
    assert request(service.http_url, "/v2/health/ready").status == 200


def test_the_server_has_the_python_backend_and_three_ports(stand_in: TritonServer) -> None:
    """CVE-2025-23268, CVE-2026-24213 to -24215: DALI; CVE-2025-23335: TensorRT; CVE-2025-33238: SageMaker's port."""
    assert wheel_server().backend_names == ("python",)
    sockets = {str(link.readlink()) for link in Path(f"/proc/{stand_in.pid}/fd").iterdir()}
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in tables.splitlines()]
    listening = {
        int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }
    assert listening == {stand_in.http_port, stand_in.grpc_port, stand_in.metrics_port}


def test_the_page_counts_the_faults_that_it_lists() -> None:
    rows = [first for first, *_ in table("protection.md", "published fault")]
    listed = [cve for row in rows for cve in row.partition(": ")[2].split(", ")]
    assert all(re.fullmatch(r"CVE-\d{4}-\d{4,5}", cve) for cve in listed)
    assert len(set(listed)) == len(listed)
    assert f"published {len(listed)} faults" in (PAGES / "protection.md").read_text(encoding="utf-8")
