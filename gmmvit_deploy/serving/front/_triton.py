"""Ask a Triton server on this machine for logits or features, over gRPC."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np  # here, so that no request waits for the imports
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gmmvit_deploy.inference import GROUPED
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.serving.front._uploads import Refusal, overloaded
from gmmvit_deploy.serving.front.options import FrontOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

_READY_S, _ANSWER_S = 2.0, 60.0
_CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A server that is started again is reached at once; by default, the pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_GROUPED_BYTES = 8 * 2**10
"""The maximum size of an image that is sent with others: a larger one takes longer to decode than to pass on alone."""
_TYPES = {"FP32": np.float32, "BOOL": np.bool_}
_OF_TRITON = re.compile(r"^(\[request id: [^\]]*\] )?in ensemble '[^']*', ")
"""How an error of a model inside an ensemble begins."""


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
    """A connection to Triton's gRPC port.  Use it inside ``async with Triton(options) as triton:``.

    Errors of every method: Refusal with status 503 when Triton is overloaded or not reachable, 504 when Triton does
    not answer in time, 400 when Triton refuses the images, and 502 for every other error. The texts with status 502
    name no detail, because an error inside the server can contain names that strangers must not know.
    """

    def __init__(self, options: FrontOptions) -> None:
        self._options = options
        self._models: dict[str, Model] = {}
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._channel: grpc.aio.Channel
        self._stub: service_pb2_grpc.GRPCInferenceServiceStub
        self._watching: asyncio.Task[None]

    async def __aenter__(self) -> Triton:
        address = self._options.triton_url.removeprefix("grpc://")
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL)
        # The stub of tritonclient's protocol: its InferenceServerClient needs a third more time for a request.
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._watching = asyncio.create_task(self._forget_models_of_a_lost_server())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await self._channel.close()

    async def _forget_models_of_a_lost_server(self) -> None:
        """Forget the models at each change of the connection: a server that is started again may have other bundles."""
        while True:
            await self._channel.wait_for_state_change(self._channel.get_state())
            self._models.clear()

    async def ready(self) -> bool:
        """Return whether the server and all models are ready."""
        server = service_pb2.ServerReadyRequest()
        models = [service_pb2.ModelReadyRequest(name=name) for name in self._options.models]
        try:
            if not (await self._stub.ServerReady(server, timeout=_READY_S)).ready:
                return False
            answers = await asyncio.gather(*(self._stub.ModelReady(model, timeout=_READY_S) for model in models))
        except grpc.aio.AioRpcError:
            return False
        return all(answer.ready for answer in answers)

    async def model(self, name: str) -> Model:
        """Return the description of a model, which is read again after the connection to the server was lost."""
        model = self._models.get(name)
        if model is None:
            answer = await self._answered(self._stub.ModelConfig, service_pb2.ModelConfigRequest(name=name))
            try:
                model = self._models[name] = _model(answer.config)
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
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="IMAGE", datatype="BYTES", shape=[len(images), 1])
        for name in outputs:
            request.outputs.add(name=name)
        if grouped:
            request.parameters[GROUPED].bool_param = True
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(image)) + image for image in images))
        answer = await self._answered(self._stub.ModelInfer, request)
        values = {}
        for output, content in zip(answer.outputs, answer.raw_output_contents, strict=False):
            if output.datatype in _TYPES and list(output.shape)[:-1] == [len(images)]:
                values[output.name] = np.frombuffer(content, _TYPES[output.datatype]).reshape(output.shape)
        if missing := [name for name in outputs if name not in values]:
            raise Refusal(502, f"the server sent no {missing[0]} for the images")
        return values

    async def _answered(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        try:
            return await method(request, timeout=_ANSWER_S)
        except grpc.aio.AioRpcError as exc:
            if exc.code() == grpc.StatusCode.UNAVAILABLE and not _OF_TRITON.match(exc.details() or ""):
                self._models.clear()  # the next server may serve other bundles
            raise _refusal(exc) from exc


class _Group:
    """Small images of several requests, and the task that asks for their answers."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.answer: asyncio.Task[dict[str, NDArray[Any]] | None]


def _model(config: Any) -> Model:
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    return Model(
        name=config.name,
        label_set=LabelSet.from_parameters(parameters),
        bundle=parameters["gmmvit_bundle_sha256"],
        runner=parameters.get("gmmvit_runner", ""),
        max_batch=config.max_batch_size,
        max_group=min(config.max_batch_size, int(parameters.get("grouped_images", 1))),
        outputs={output.name: output.dims[-1] for output in config.output},
    )


def _refusal(error: grpc.aio.AioRpcError) -> Refusal:
    """Return what the client of the front gets in place of an error of Triton, or of the connection to Triton."""
    status, text = error.code().name, error.details() or ""
    reason = _OF_TRITON.sub("", text)
    if status == "DEADLINE_EXCEEDED":
        return Refusal(504, "the server did not answer in time")
    if status in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"):
        by_a_model = reason != text
        return overloaded(reason if by_a_model else "the server is not reachable; send the request again later")
    if status == "INVALID_ARGUMENT":
        position = re.match(r"image (\d+): ", reason)
        return Refusal(400, reason or "the server refused the images", image=int(position[1]) if position else None)
    return Refusal(502, "the server failed to answer")
