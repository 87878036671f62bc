"""The project's gRPC client sends what Triton's client sends, and keeps no values from request to request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from gmmvit_deploy.runtimes.programs import triton_grpc
from gmmvit_deploy.runtimes.programs.triton_grpc import GrpcClient


class Recorder(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server of gRPC that keeps the requests, and answers with a given message or status."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.answer = service_pb2.ModelInferResponse()
        self.status: grpc.StatusCode | None = None

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.status is not None:
            context.abort(self.status, "the reason")
        return self.answer


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def address(recorder: Recorder) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(recorder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def client(address: str) -> Iterator[GrpcClient]:
    opened = GrpcClient(address, channel_arguments=[("grpc.enable_http_proxy", 0)])
    yield opened
    opened.close()


VALUES = {
    "UINT8": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "FP32": np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1),  # not contiguous
    "BYTES": np.array([[b"\x00first\x00"], [b""]], dtype=np.object_),
}


def asked(client: GrpcClient, values: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {"outputs": ("logits", "features"), "client_timeout": 5.0, **options}
    return client.infer(model_name="network", name="input", values=values, **settings)


@pytest.mark.parametrize("class_count", [0, 3])
@pytest.mark.parametrize("datatype", VALUES)
def test_the_request_is_that_of_tritons_client(
    datatype: str, class_count: int, client: GrpcClient, address: str, recorder: Recorder
) -> None:
    values = VALUES[datatype]
    asked(client, values, class_count=class_count, headers={"authorization": "Bearer key"})
    with tritonclient.grpc.InferenceServerClient(address) as theirs:
        tensor = tritonclient.grpc.InferInput("input", list(values.shape), datatype)
        tensor.set_data_from_numpy(values)
        names = ("logits", "features")
        outputs = [tritonclient.grpc.InferRequestedOutput(name, class_count=class_count) for name in names]
        theirs.infer("network", [tensor], outputs=outputs)
    ours, expected = recorder.requests
    assert ours == expected
    assert recorder.metadata[0]["authorization"] == "Bearer key"
    assert "authorization" not in recorder.metadata[1]


def test_a_kept_message_keeps_no_values(
    client: GrpcClient, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_grpc, "_MOST_KINDS", 2)
    batches = [np.full((rows, 2), rows + 10 * turn, np.uint8) for turn in range(2) for rows in (1, 2, 3)]
    for batch in batches:
        asked(client, batch)
        asked(client, batch + 1)
    sent = [np.frombuffer(r.raw_input_contents[0], np.uint8).reshape(r.inputs[0].shape) for r in recorder.requests]
    assert all(len(request.raw_input_contents) == 1 for request in recorder.requests)
    for position, batch in enumerate(batches):
        np.testing.assert_array_equal(sent[2 * position], batch)
        np.testing.assert_array_equal(sent[2 * position + 1], batch + 1)


def test_the_outputs_are_read_by_their_names(client: GrpcClient, recorder: Recorder) -> None:
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    recorder.answer.outputs.add(name="labels", datatype="BYTES", shape=[2])
    recorder.answer.raw_output_contents.append(b"\x01\x00\x00\x00a\x02\x00\x00\x00bc")
    recorder.answer.outputs.add(name="logits", datatype="FP32", shape=[2, 3])
    recorder.answer.raw_output_contents.append(logits.tobytes())
    answers = asked(client, VALUES["UINT8"])
    assert list(answers) == ["labels", "logits"]
    assert answers["labels"].tolist() == [b"a", b"bc"]
    np.testing.assert_array_equal(answers["logits"], logits)


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "UNAVAILABLE"])
def test_a_refusal_has_its_status_and_reason(status: str, client: GrpcClient, recorder: Recorder) -> None:
    recorder.status = grpc.StatusCode[status]
    with pytest.raises(InferenceServerException) as raised:
        asked(client, VALUES["UINT8"])
    assert (raised.value.status(), raised.value.message()) == (f"StatusCode.{status}", "the reason")
