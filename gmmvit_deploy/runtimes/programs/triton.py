"""Send requests to a running Triton server over gRPC or HTTP, and read the server's configurations and statistics."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gmmvit_deploy.errors import InputError, OverloadError, ServerError
from gmmvit_deploy.extras import require
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.programs._triton_errors import Request, error_from_refusal, error_from_transport
from gmmvit_deploy.runtimes.programs.access import NO_ACCESS, Access, parse_url

if TYPE_CHECKING:
    from numpy.typing import NDArray


DEFAULT_MODEL = "gmmvit"
_FIRST_WAIT_S, _MAX_WAIT_S = 0.1, 5.0
_Result = TypeVar("_Result")
_ADDRESS_HINT = "type --url and the address of a Triton server: grpc://HOST:PORT or http://HOST:PORT"
_TRITON_TYPES = {"uint8": "UINT8", "float32": "FP32", "object": "BYTES"}
_SERVER_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
_RUNNER = "gmmvit_runner"
_STATED = {"runner": _RUNNER, "threads": "threads", "intra_op_thread_count": "intra_op_thread_count"}
"""Setting → the parameter of a model's configuration that states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model's configuration, as the server reports it.

    max_batch: 0 for a model that takes no batches.  inputs: name of the input → shape without the batch.
    bundle_sha256: the hash of the bundle from which the model was made; None if it was not made from a bundle.
    preprocessing: of a model that decodes images, the `ImageSpec` as JSON and the number of threads; otherwise None.
    runner: the runner of the network, such as ``openvino+kernels``; "" if it is not stated.
    settings: those that determine the model's speed, such as backend, instances, threads and queue delay.
    """

    name: str
    max_batch: int
    inputs: dict[str, tuple[int, ...]]
    outputs: tuple[str, ...]
    label_set: LabelSet
    bundle_sha256: str | None
    preprocessing: Mapping[str, Any] | None
    precision: str
    runner: str
    on_gpu: bool
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimings:
    """The times of a model's successful requests, summed over the requests.

    executions: the number of batches that the backend ran.
    parts_ns: part of ``total_ns``, as Triton's statistics name it (`_SERVER_PARTS`) → time.
    """

    requests: int
    executions: int
    total_ns: int
    parts_ns: Mapping[str, int]

    def since(self, before: ServerTimings) -> ServerTimings:
        """Return the times since an earlier reading ``before`` of the same model."""
        return ServerTimings(
            requests=self.requests - before.requests,
            executions=self.executions - before.executions,
            total_ns=self.total_ns - before.total_ns,
            parts_ns={part: spent - before.parts_ns[part] for part, spent in self.parts_ns.items()},
        )


class TritonConnection:
    """A connection to a Triton server.  Each thread that uses the connection gets its own client.

    No request is repeated: the caller sees every refusal.
    Errors of every method: ServerError when the server does not answer, or does not have the model.
    RequestRejectedError when the server rejects the request as invalid or too large.
    OverloadError, KeyRefusedError and NotOfferedError as `_triton_errors` lists them.
    """

    def __init__(self, url: str, *, access: Access = NO_ACCESS, timeout_s: float = 60.0) -> None:
        """Create a connection.  The first request opens the connection.

        url: as for `parse_url`.  timeout_s: the maximum time to wait for a response.
        Errors: InputError when `parse_url` refuses the address, or when a key would leave this machine without TLS.
        MissingDependencyError when Triton's client is not installed.
        """
        self.url = url
        self._server = parse_url(url)
        self.protocol = self._server.protocol
        if access.key and not (self._server.tls or self._server.is_loopback):
            raise InputError(
                f"{url}: the key of {access.key_path} would be sent to another machine without encryption",
                hint="type https:// or grpcs://, or leave --key-file out and unset GMMVIT_KEY_FILE",
            )
        self._access = access
        self._timeout_s = timeout_s
        self._package = require(f"tritonclient.{self.protocol}", package="tritonclient", extra="client")
        self._error = require("tritonclient.utils", package="tritonclient", extra="client").InferenceServerException
        # Triton's client passes on the exceptions of gevent, sockets, the HTTP parser and JSON.
        self._transport_errors: tuple[type[Exception], ...] = (OSError, ValueError)
        if self.protocol == "http":
            parser = require("geventhttpclient.response", package="geventhttpclient", extra="client")
            self._transport_errors += (parser.HTTPParseError,)
        self._local = threading.local()
        self._clients: list[Any] = []

    def __enter__(self) -> TritonConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every client, because a server that shuts down waits until all connections are closed."""
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def infer(self, model: str, name: str, values: NDArray[Any], *, output: str = "logits") -> NDArray[Any]:
        """Run a model, and return the output called ``output``.

        name, values: of the input: (B, …) in uint8 or float32, or encoded images as an array of bytes objects.
        """
        return self.infer_all(model, name, values, outputs=(output,))[0]

    def best_classes(self, model: str, name: str, values: NDArray[Any]) -> list[tuple[int, str]]:
        """Return (index, label) of the most likely class of each input, as classified by the server."""
        (answers,) = self.infer_all(model, name, values, outputs=["logits"], class_count=1)
        texts = [bytes(answer).decode() for answer in answers.reshape(-1)]
        return [(int(text.split(":")[1]), text.split(":", 2)[2]) for text in texts]

    def infer_all(
        self, model: str, name: str, values: NDArray[Any], *, outputs: Sequence[str], class_count: int = 0
    ) -> tuple[NDArray[Any], ...]:
        """Run a model as `infer` does, and return the named outputs.

        class_count: the number of classes that the server returns as text instead of the values; 0 for the values.
        """
        tensor = self._package.InferInput(name, list(values.shape), _TRITON_TYPES[str(values.dtype)])
        tensor.set_data_from_numpy(values)
        requested = [self._package.InferRequestedOutput(output, class_count=class_count) for output in outputs]
        received = self._call(model, "infer", model_name=model, inputs=[tensor], outputs=requested)
        answers: list[NDArray[Any]] = []
        for output in outputs:
            rows: NDArray[Any] | None = received.as_numpy(output)
            if rows is None or rows.shape[0] != values.shape[0]:
                shape = "no output" if rows is None else f"shape {rows.shape}"
                raise ServerError(
                    f"{model} at {self.url}: expected {output} for {values.shape[0]} inputs, got {shape}",
                    hint="type --served-name with the name of a model that gmmvit repository wrote",
                )
            answers.append(rows)
        return tuple(answers)

    def model(self, name: str) -> ServedModel:
        """Read a model's configuration from the server."""
        answer = self._call(name, "get_model_config", model_name=name)
        try:
            return _served_model(name, answer)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ServerError(
                f"the program that answers at {self.url} is not a Triton server: it sent no configuration of {name}",
                hint=_ADDRESS_HINT,
            ) from exc

    def counts(self, name: str) -> tuple[int, int]:
        """Return (number of inputs, number of batches that were run) of a model since the server started."""
        stats = self._statistics(name)
        return int(stats.get("inference_count", 0)), int(stats.get("execution_count", 0))

    def timings(self, name: str) -> ServerTimings:
        """Read the server's own timings of a model's requests, summed since the server started."""
        stats = self._statistics(name)
        spent = stats.get("inference_stats", {})
        parts = {part: int(spent.get(part, {}).get("ns", 0)) for part in (*_SERVER_PARTS, "success")}
        return ServerTimings(
            requests=int(spent.get("success", {}).get("count", 0)),
            executions=int(stats.get("execution_count", 0)),
            total_ns=parts.pop("success"),
            parts_ns=parts,
        )

    def _statistics(self, name: str) -> Mapping[str, Any]:
        answer = self._call(name, "get_inference_statistics", model_name=name)
        stats: Mapping[str, Any] = answer["model_stats"][0]
        return stats

    def version(self) -> str:
        """Return Triton's version, such as ``2.57.0``."""
        answer = self._call("the server", "get_server_metadata")
        if not isinstance(answer, dict) or not answer.get("version"):
            raise ServerError(
                f"the program that answers at {self.url} is not a Triton server: it sent no version", hint=_ADDRESS_HINT
            )
        return str(answer["version"])

    def _client(self) -> Any:
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = self._new_client()
            self._clients.append(client)
        return client

    def _new_client(self) -> Any:
        """Return an ``InferenceServerClient``, which connects with its first request."""
        server, ca = self._server, self._access.ca_path
        if self.protocol == "grpc":
            # Messages may have any size, and requests to this machine bypass the proxy.
            channel = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
            if server.is_loopback:
                channel.append(("grpc.enable_http_proxy", 0))
            roots = str(ca) if ca and server.tls else None
            return self._package.InferenceServerClient(
                server.address, ssl=server.tls, root_certificates=roots, channel_args=channel
            )
        trusted = {"ca_certs": str(ca)} if ca else {}
        return self._package.InferenceServerClient(
            server.address,
            ssl=server.tls,
            ssl_options=trusted if server.tls else None,
            connection_timeout=self._timeout_s,
            network_timeout=self._timeout_s,
        )

    def _call(self, model: str, method: str, **arguments: Any) -> Any:
        if self.protocol == "grpc":  # the HTTP client has its own time limits, and answers with JSON
            arguments["client_timeout"] = self._timeout_s
            if method.startswith("get_"):
                arguments["as_json"] = True
        if self._access.key:
            arguments["headers"] = self._access.headers
        request = Request(self.url, model, method, self._timeout_s, self._access)
        try:
            return getattr(self._client(), method)(**arguments)
        except self._error as exc:
            raise error_from_refusal(exc, request) from exc
        except self._transport_errors as exc:
            raise error_from_transport(exc, request) from exc


def _served_model(name: str, answer: Mapping[str, Any]) -> ServedModel:
    config: Mapping[str, Any] = answer.get("config", answer)
    parameters = {key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()}
    return ServedModel(
        name=name,
        max_batch=int(config.get("max_batch_size", 0)),
        inputs={i["name"]: tuple(map(int, i["dims"])) for i in config["input"]},
        outputs=tuple(output["name"] for output in config["output"] if output["name"] != DEFERRED),
        label_set=LabelSet.from_parameters(parameters),
        bundle_sha256=parameters.get("gmmvit_bundle_sha256"),
        preprocessing=json.loads(parameters.get("preprocessing", "null")),
        precision=RunnerName.parse(parameters.get(_RUNNER, "")).precision,
        runner=parameters.get(_RUNNER, ""),
        on_gpu=any(group.get("kind") == "KIND_GPU" for group in config.get("instance_group", [])),
        settings=_settings(config, parameters),
    )


def _settings(config: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, str]:
    delay = config.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0)
    return {
        "backend": config.get("backend") or config.get("platform", ""),
        "instances": str(sum(int(group.get("count", 1)) for group in config.get("instance_group", []))),
        "queue delay": f"{delay} µs",
        **{name: parameters[stated] for name, stated in _STATED.items() if stated in parameters},
    }


def with_retries(request: Callable[[], _Result], *, deadline_s: float) -> _Result:
    """Return the answer of ``request``, and repeat it after each OverloadError until ``deadline_s`` has passed.

    wait_s = U(0, min(5, 0.1 · 2ⁿ)) after the refusal number n = 0, 1, …; U is uniform. Random waits keep clients that
    were refused together from coming back together.
    deadline_s: seconds from now in which a repetition may start; 0 repeats nothing.
    Errors: OverloadError when the next wait would end after the deadline. Every other error of ``request`` at once.
    """
    end = time.monotonic() + deadline_s
    refusals = 0
    while True:
        try:
            return request()
        except OverloadError as exc:
            longest_s = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** min(refusals, 16))
            wait_s = random.uniform(0.0, longest_s)  # noqa: S311 - guards nothing
            refusals += 1
            if time.monotonic() + wait_s > end:
                if refusals == 1:
                    raise
                raise OverloadError(f"{exc}; refused {refusals} times within {deadline_s:g} s", hint=exc.hint) from exc
        time.sleep(wait_s)
