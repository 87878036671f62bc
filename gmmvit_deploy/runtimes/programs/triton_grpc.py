"""A gRPC client of Triton that keeps the messages of its requests.

``tritonclient.grpc`` builds each request from objects of its own. This client keeps a message for each kind of request,
and adds only the values. `benchmarks/one_image.py` compares both clients. The messages are those of
``tritonclient.grpc``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.extras import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GrpcClient"]

_MOST_KINDS = 64
"""The maximum number of messages that a client keeps; a client sends few models, names and batch sizes."""


class GrpcClient:
    """A client with a single channel, which connects with the first request.

    The arguments and results of ``get_…`` are those of the methods of ``tritonclient.grpc.InferenceServerClient``.
    Errors of every method except `close`: ``tritonclient.utils.InferenceServerException`` with the status of gRPC.
    """

    def __init__(
        self,
        address: str,
        *,
        channel_arguments: Sequence[tuple[str, int]],
        tls: bool = False,
        root_certificates: bytes | None = None,
    ) -> None:
        """Create a client.

        address: host:port.  channel_arguments: settings of gRPC's channel.
        tls: True to encrypt.  root_certificates: the trusted authorities in PEM form; None for the public authorities.
        """
        self._grpc = require("grpc", package="grpcio", extra="client")
        self._messages = require("tritonclient.grpc.service_pb2", package="tritonclient", extra="client")
        services = require("tritonclient.grpc.service_pb2_grpc", package="tritonclient", extra="client")
        utils = require("tritonclient.utils", package="tritonclient", extra="client")
        self._error = utils.InferenceServerException
        self._serialised_strings = utils.serialize_byte_tensor
        self._strings = utils.deserialize_bytes_tensor
        self._data_type, self._numpy_type = utils.np_to_triton_dtype, utils.triton_to_np_dtype
        options = list(channel_arguments)
        if tls:
            credentials = self._grpc.ssl_channel_credentials(root_certificates=root_certificates)
            self._channel = self._grpc.secure_channel(address, credentials, options=options)
        else:
            self._channel = self._grpc.insecure_channel(address, options=options)
        self._stub = services.GRPCInferenceServiceStub(self._channel)
        self._kinds: dict[tuple[Any, ...], Any] = {}

    def infer(
        self,
        *,
        model_name: str,
        name: str,
        values: NDArray[Any],
        outputs: Sequence[str],
        class_count: int = 0,
        client_timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Run a model, and return name of an output → array.  Outputs that the server leaves out are absent.

        name: the name of the input.  values: the input, numbers or an array of bytes objects.
        class_count: the number of classes that the server returns for each input, as bytes; 0 for the outputs.
        client_timeout: the maximum time of the request, in seconds.  headers: metadata of the request.
        """
        request = self._messages.ModelInferRequest()
        request.CopyFrom(self._kind(model_name, name, values, tuple(outputs), class_count))
        encoded = values.dtype.hasobject and values.size > 0
        serialised = self._serialised_strings(values).item() if encoded else values.tobytes()
        request.raw_input_contents.append(serialised)
        answer = self._call(self._stub.ModelInfer, request, client_timeout, headers)
        # A server without the extension for binary data sends the values in the messages of the outputs instead.
        return {
            output.name: self._array(output, raw)
            for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=False)
        }

    def _kind(self, model: str, name: str, values: NDArray[Any], outputs: tuple[str, ...], class_count: int) -> Any:
        """Return the message for requests of this kind, without values."""
        key = (model, name, values.shape, values.dtype, outputs, class_count)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            kind = self._messages.ModelInferRequest(model_name=model)
            kind.inputs.add(name=name, datatype=self._data_type(values.dtype), shape=values.shape)
            for output in outputs:
                requested = kind.outputs.add(name=output)
                if class_count:
                    requested.parameters["classification"].int64_param = class_count
            self._kinds[key] = kind
        return kind

    def _array(self, output: Any, raw: bytes) -> NDArray[Any]:
        import numpy as np

        if output.datatype == "BYTES":
            values: NDArray[Any] = self._strings(raw)
        else:
            values = np.frombuffer(raw, self._numpy_type(output.datatype))
        return values.reshape(tuple(output.shape))

    def get_model_config(self, *, model_name: str, client_timeout: float, headers: Any = None) -> Any:
        request = self._messages.ModelConfigRequest(name=model_name)
        return _as_json(self._call(self._stub.ModelConfig, request, client_timeout, headers))

    def get_inference_statistics(self, *, model_name: str, client_timeout: float, headers: Any = None) -> Any:
        request = self._messages.ModelStatisticsRequest(name=model_name)
        return _as_json(self._call(self._stub.ModelStatistics, request, client_timeout, headers))

    def get_server_metadata(self, *, client_timeout: float, headers: Any = None) -> Any:
        request = self._messages.ServerMetadataRequest()
        return _as_json(self._call(self._stub.ServerMetadata, request, client_timeout, headers))

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout_s: float, headers: Mapping[str, str] | None) -> Any:
        metadata: Iterable[tuple[str, str]] | None = tuple(headers.items()) if headers else None
        try:
            return method(request, timeout=timeout_s, metadata=metadata)
        except self._grpc.RpcError as exc:
            raise self._error(
                msg=exc.details(), status=str(exc.code()), debug_details=exc.debug_error_string()
            ) from None


def _as_json(message: Any) -> Any:
    json_format = require("google.protobuf.json_format", package="protobuf", extra="client")
    return json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))
