"""Ask a Triton server on this machine for logits or features, over HTTP/1.1 with KServe's binary tensors.

The connections are a protocol of asyncio on httptools, because gRPC for Python, which has threads of its own, needs
more than twice its processor time for a request.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httptools
import numpy as np  # here, so that no request waits for the import

from gmmvit_deploy.inference import GROUPED
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.serving.front._uploads import Refusal, overloaded
from gmmvit_deploy.serving.front.options import FrontOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

_READY_S, _ANSWER_S = 2.0, 60.0
_GROUPED_BYTES = 8 * 2**10
"""The maximum size of an image that is sent with others: a larger one takes longer to decode than to pass on alone."""
_TYPES = {"FP32": np.float32, "BOOL": np.bool_}
_OF_TRITON = re.compile(r"^(\[request id: [^\]]*\] )?in ensemble '[^']*', ")
"""How an error of a model inside an ensemble begins."""
_JSON_LENGTH = "Inference-Header-Content-Length"
"""The header with the length of the JSON before the binary tensors."""
_MAX_IDLE = 32
"""The number of connections that are kept for further requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model.

    runner: "" if the model states none.  max_group: the number of small images that are sent together.
    outputs: name → values for each image; `inference.DEFERRED` is that of a cascade, which says which images float32
    computed again.
    """

    name: str
    label_set: LabelSet
    bundle: str
    runner: str
    max_batch: int
    max_group: int
    outputs: Mapping[str, int]


class Triton:
    """The HTTP port of a Triton server.  Use it inside ``async with Triton(options) as triton:``.

    Errors of every method: Refusal with status 503 when Triton is overloaded or not reachable, 504 when Triton does
    not answer in time, 400 when Triton refuses the images, and 502 for every other error. The texts with status 502
    name no detail, because an error inside the server can contain names that strangers must not know.
    """

    def __init__(self, options: FrontOptions) -> None:
        self._options = options
        self._models: dict[str, Model] = {}
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Triton:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self._idle):
            connection.close()

    async def ready(self) -> bool:
        """Return whether the server and all models are ready."""
        paths = ["/v2/health/ready", *(f"/v2/models/{name}/ready" for name in self._options.models)]
        try:
            answers = await asyncio.gather(*(self._answer("GET", path, timeout_s=_READY_S) for path in paths))
        except Refusal:
            return False
        return all(answer.status == 200 for answer in answers)

    async def model(self, name: str) -> Model:
        """Return the description of a model, which is read again after a connection to the server was lost."""
        model = self._models.get(name)
        if model is None:
            answer = _accepted(await self._answer("GET", f"/v2/models/{name}/config"))
            try:
                model = self._models[name] = _model(json.loads(answer.body))
            except (KeyError, TypeError, ValueError) as exc:
                raise Refusal(502, "the server sent no description of its model") from exc
        return model

    async def answers(self, model: str, images: Sequence[bytes], outputs: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return name of an output → its values: float32 (images, values), of `inference.DEFERRED` bool.

        Small images of requests that arrive at the same time are sent together: Triton's work for a request takes
        longer than the decoding of such an image. If Triton refuses them, each is sent alone, and gets its own answer.
        """
        described = self._models.get(model)
        if described is None or len(images) > 1 or len(images[0]) > _GROUPED_BYTES:
            return await self._asked(model, images, outputs)
        group = self._groups.get(key := (model, *outputs))
        if group is None or len(group.images) >= described.max_group:
            group = self._groups[key] = _Group()
            group.answer = asyncio.create_task(self._together(group, *key))
        row = len(group.images)
        group.images += images
        values = await asyncio.shield(group.answer)  # a client that leaves takes no answer from the others
        if values is None:
            return await self._asked(model, images, outputs)
        return {name: rows[row : row + 1] for name, rows in values.items()}

    async def _together(self, group: _Group, model: str, *outputs: str) -> dict[str, NDArray[Any]] | None:
        """Return the answer to a group; None if each image must be sent alone.

        The event loop starts this task after the requests that have arrived, which are then in the group.
        """
        if self._groups.get(key := (model, *outputs)) is group:
            del self._groups[key]
        if len(group.images) == 1:
            return await self._asked(model, group.images, outputs)
        try:
            return await self._asked(model, group.images, outputs, grouped=True)
        except Refusal as refusal:
            if refusal.status == 504:
                raise
            return None

    async def _asked(
        self, model: str, images: Sequence[bytes], outputs: Collection[str], *, grouped: bool = False
    ) -> dict[str, NDArray[Any]]:
        tensor = b"".join(struct.pack("<I", len(image)) + image for image in images)
        size = {"binary_data_size": len(tensor)}
        request = {
            "inputs": [{"name": "IMAGE", "datatype": "BYTES", "shape": [len(images), 1], "parameters": size}],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
            "parameters": {GROUPED: True} if grouped else {},
        }
        answer = _accepted(await self._answer("POST", f"/v2/models/{model}/infer", request, tensor))
        try:
            values = _values(answer, len(images))
        except (KeyError, TypeError, ValueError) as exc:
            raise Refusal(502, "the server sent no answer that can be read") from exc
        if missing := [name for name in outputs if name not in values]:
            raise Refusal(502, f"the server sent no {missing[0]} for the images")
        return values

    async def _answer(
        self, method: str, path: str, request: Any = None, tensor: bytes = b"", *, timeout_s: float = _ANSWER_S
    ) -> _Answer:
        """Send JSON and a tensor, and return the answer, whatever its status."""
        text = b"" if request is None else json.dumps(request).encode()
        of_body = f"{_JSON_LENGTH}: {len(text)}\r\nContent-Length: {len(text) + len(tensor)}\r\n" if text else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{of_body}\r\n".encode()
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._idle.pop() if self._idle else await self._connected()
                try:
                    return await connection.answer(head + text, tensor)
                finally:
                    if connection.reusable and len(self._idle) < _MAX_IDLE:
                        self._idle.append(connection)
                    else:
                        connection.close()
        except TimeoutError as exc:
            raise Refusal(504, "the server did not answer in time") from exc
        except (OSError, httptools.HttpParserError) as exc:
            self._models.clear()  # the next server may serve other bundles
            raise overloaded("the server is not reachable; send the request again later") from exc

    async def _connected(self) -> _Connection:
        host, _, port = self._options.triton_url.removeprefix("http://").rpartition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._lost), host.strip("[]"), int(port))
        return connection

    def _lost(self, connection: _Connection) -> None:
        """Forget the models: a server that is started again may have other bundles."""
        self._models.clear()
        if connection in self._idle:
            self._idle.remove(connection)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of HTTP.  headers: lower-case name → value."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class _Connection(asyncio.Protocol):
    """A connection to a server, for one request at a time."""

    def __init__(self, on_lost: Callable[[_Connection], None]) -> None:
        """on_lost: called when the server closes the connection."""
        self._on_lost = on_lost
        self._parser = httptools.HttpResponseParser(self)
        self._closed = False
        self._transport: asyncio.Transport
        self._waiting: asyncio.Future[_Answer] | None = None
        self.reusable = False
        """True if the last answer is complete, and the server takes another request."""

    async def answer(self, *parts: bytes) -> _Answer:
        """Send a request, and return the answer.  Errors: ConnectionError, or httptools.HttpParserError."""
        self.reusable = False
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts)
        return await self._waiting

    def close(self) -> None:
        self._closed = True
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(exc or ConnectionResetError("the server closed the connection"))
        if not self._closed:
            self._on_lost(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(_Answer(self._parser.get_status_code(), self._headers, b"".join(self._body)))

    def _fail(self, exc: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc)


class _Group:
    """Small images of several requests, and the task that asks for their answers."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.answer: asyncio.Task[dict[str, NDArray[Any]] | None]


def _model(config: Any) -> Model:
    parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
    return Model(
        name=config["name"],
        label_set=LabelSet.from_parameters(parameters),
        bundle=parameters["gmmvit_bundle_sha256"],
        runner=parameters.get("gmmvit_runner", ""),
        max_batch=config["max_batch_size"],
        max_group=min(config["max_batch_size"], int(parameters.get("grouped_images", 1))),
        outputs={output["name"]: output["dims"][-1] for output in config["output"]},
    )


def _values(answer: _Answer, count: int) -> dict[str, NDArray[Any]]:
    """Return name of an output → its rows for ``count`` images.

    Errors: KeyError, TypeError or ValueError for an answer of another form.
    """
    values, end = {}, int(answer.headers[_JSON_LENGTH.lower().encode()])
    for output in json.loads(answer.body[:end])["outputs"]:
        start, end = end, end + output["parameters"]["binary_data_size"]
        if output["datatype"] in _TYPES and output["shape"][:-1] == [count]:
            rows: NDArray[Any] = np.frombuffer(answer.body[start:end], _TYPES[output["datatype"]])
            values[output["name"]] = rows.reshape(output["shape"])
    return values


def _accepted(answer: _Answer) -> _Answer:
    """Return an answer with status 200.  Errors: Refusal, which the client of the front gets for another one."""
    if answer.status == 200:
        return answer
    try:
        text = json.loads(answer.body)["error"]
    except (KeyError, TypeError, ValueError):
        text = ""
    reason = _OF_TRITON.sub("", text)
    by_a_model = reason != text
    if answer.status == 503:
        raise overloaded(reason if by_a_model else "the server is not reachable; send the request again later")
    if answer.status == 400 and by_a_model:  # Triton itself answers 400 also to errors of its own
        position = re.match(r"image (\d+): ", reason)
        raise Refusal(400, reason, image=int(position[1]) if position else None)
    raise Refusal(502, "the server failed to answer")
