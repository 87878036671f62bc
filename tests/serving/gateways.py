"""For tests of the gateway: keys, and plain requests over HTTP and gRPC."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import Service

FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}

KEY = "a-key-of-the-tests-0123456789"
OTHER_KEY = "another-key-of-the-tests-0123"
BEARER = {"Authorization": f"Bearer {KEY}"}


def key_file(folder: Path, *lines: str) -> Path:
    path = folder / "keys.txt"
    path.write_text("# clients of the tests\n" + "".join(f"{line}\n" for line in lines or (f"tester {KEY}",)))
    return path


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request(
    url: str,
    path: str,
    body: bytes | None = None,
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
    key: str | None = KEY,
    ca: Path | None = None,
    connection: http.client.HTTPConnection | None = None,
) -> Answer:
    """Send a request, and return the answer.  connection: a kept connection to use."""
    own = connection is None
    if connection is None:
        parts = urlsplit(url)
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=str(ca) if ca else None)
            connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=30, context=context)
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    bearer = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, {**bearer, **(headers or {})})
        answer = connection.getresponse()
        lower = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, lower, answer.read())
    finally:
        if own:
            connection.close()


def binary_request(name: str, values: np.ndarray, datatype: str = "UINT8") -> tuple[bytes, dict[str, str]]:
    """Return (body, headers) of a request with a binary tensor that asks for binary logits."""
    tensor = {"name": name, "shape": list(values.shape), "datatype": datatype}
    tensor["parameters"] = {"binary_data_size": values.nbytes}
    output = {"name": "logits", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return head + values.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def logits_of(answer: Answer) -> np.ndarray:
    head = int(answer.headers["inference-header-content-length"])
    shape = json.loads(answer.body[:head])["outputs"][0]["shape"]
    return np.frombuffer(answer.body[head:], np.float32).reshape(shape)


def grpc_request(name: str, values: np.ndarray, *, model: str = "gmmvit_network") -> Any:
    """Return a ModelInferRequest with raw contents."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name=name, datatype="UINT8", shape=list(values.shape))
    message.outputs.add(name="logits")
    message.raw_input_contents.append(values.tobytes())
    return message


@contextmanager
def running_service(
    repository: Path, folder: Path, *, on_line: Callable[[str], None] | None = None, **settings: Any
) -> Iterator[Service]:
    """Run a server, its front and a gateway with the access log ``access.log`` in the folder."""
    chosen = GatewaySettings(keys=key_file(folder), access_log=folder / "access.log", **settings)
    with Service(ServerOptions(**FREE_PORTS), chosen, on_gateway_line=on_line) as service:
        service.start(TritonServer(repository, options=service.server_options), cancelled=lambda: False)
        yield service


class Stub:
    """Triton's gRPC service with a key."""

    def __init__(self, url: str, *, key: str | None = KEY, ca: Path | None = None) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        scheme, _, address = url.partition("://")
        if scheme == "grpcs":
            credentials = grpc.ssl_channel_credentials(ca.read_bytes() if ca else None)
            self.channel = grpc.secure_channel(address, credentials, options=options)
        else:
            self.channel = grpc.insecure_channel(address, options=options)
        self.service = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(self, method: str, message: Any, **options: Any) -> tuple[Any, dict[str, str]]:
        """Return (answer, initial metadata)."""
        options = {"timeout": 20, "metadata": self.metadata, **options}
        answer, call = getattr(self.service, method).with_call(message, **options)
        return answer, dict(call.initial_metadata())

    def code(self, method: str, message: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
        """Return (status, message) of a call that is refused."""
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, message, **options)
        return caught.value.code(), str(caught.value.details())
