"""Ask a Triton server on this machine for logits, over HTTP with binary tensors."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np  # here, so that no request waits for the import

from gmmvit_deploy.images.labels import LabelSet
from gmmvit_deploy.runtimes.programs.triton import label_set_from
from gmmvit_deploy.serving.front.options import BUNDLE_HEADER, FrontOptions
from gmmvit_deploy.serving.front.refusals import Refusal, overloaded

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Model", "Triton"]

_LENGTH_HEADER = "Inference-Header-Content-Length"
_MOST_READINGS = 16
_MOST_ANSWERS = 4
_MOST_MODELS = 8
_log = logging.getLogger(__name__)
_MODEL_KEPT_S = 1.0
"""A description of the model is read again after this time: a server takes longer to start with another bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The served model: its labels with the task, the hash of its bundle, and the maximum batch of a request.

    classifies: True if the model has logits.
    """

    label_set: LabelSet
    bundle: str
    max_batch: int
    classifies: bool = True


class Triton:
    """A connection to Triton's HTTP port.

    Errors of every method: Refusal with status 503 when Triton is overloaded or not reachable, 504 when Triton does
    not answer in time, 400 when Triton refuses the images, and 502 for every other error. The texts with status 502
    name no detail, because an error inside the server can contain names that strangers must not know.
    """

    def __init__(self, options: FrontOptions) -> None:
        self._name = options.model
        self._client = httpx.AsyncClient(
            base_url=options.triton_url,
            timeout=httpx.Timeout(options.answer_timeout_s, connect=5.0),
            limits=httpx.Limits(max_connections=options.max_running + 4),
            trust_env=False,  # the server runs on this machine: no proxy
        )
        self._model: Model | None = None
        self._models: dict[str, Model] = {}
        self._read_at = 0.0

    async def __aenter__(self) -> Triton:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ready(self) -> bool:
        """Return whether the server and the model are ready."""
        try:
            answers = [
                await self._client.get(path, timeout=2.0)
                for path in ("/v2/health/ready", f"/v2/models/{self._name}/ready")
            ]
        except httpx.HTTPError:
            return False
        return all(answer.status_code == 200 for answer in answers)

    async def model(self) -> Model:
        """Read the description of the model, or return the description of less than a second ago."""
        if self._model is None or time.monotonic() - self._read_at > _MODEL_KEPT_S:
            self._model = None
            answer = await self._sent("GET", f"/v2/models/{self._name}/config")
            try:
                self._model = _model(answer.json())
            except (AttributeError, KeyError, TypeError, ValueError) as exc:
                raise Refusal(502, "the server sent no description of its model") from exc
            self._read_at = time.monotonic()
            if self._model.bundle not in self._models and len(self._models) == _MOST_MODELS:
                del self._models[next(iter(self._models))]  # the oldest
            self._models[self._model.bundle] = self._model
        return self._model

    async def answer(self, images: Sequence[bytes]) -> tuple[NDArray[Any], Model]:
        """Return the logits, float32 (images, classes), and the model that computed them.

        During a rollout, two servers answer, and the server that computed the logits may end before it describes its
        model. The images are then sent again.
        """
        for _ in range(_MOST_ANSWERS):
            logits, bundle = await self.logits(images)
            if (model := await self._model_of(bundle)) is not None:
                return logits, model
        _log.warning("no server described the model of bundle %s, which gave an answer", bundle[:12])
        raise overloaded("the served model is changing; send the request again later")

    async def _model_of(self, bundle: str) -> Model | None:
        """Return the description of the model of a bundle, or None if no server gives it.

        bundle: the SHA-256 that an answer states; "" if the server states no bundle.
        """
        for _ in range(_MOST_READINGS):
            model = await self.model()
            if bundle in ("", model.bundle):
                return model
            if bundle in self._models:  # a bundle's hash covers its labels
                return self._models[bundle]
            self._model = None
        return None

    async def logits(self, images: Sequence[bytes]) -> tuple[NDArray[Any], str]:
        """Return the logits, float32 (images, classes), and the bundle that the answer states, or ""."""
        header, tensor = _request(images)
        answer = await self._sent(
            "POST",
            f"/v2/models/{self._name}/infer",
            content=header + tensor,
            headers={_LENGTH_HEADER: str(len(header)), "Content-Type": "application/octet-stream"},
        )
        try:
            logits = _logits(answer.content, int(answer.headers[_LENGTH_HEADER]), len(images))
        except (KeyError, TypeError, ValueError) as exc:
            raise Refusal(502, "the server sent no logits for the images") from exc
        return logits, answer.headers.get(BUNDLE_HEADER, "")

    async def _sent(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            answer = await self._response(method, path, **arguments)
        except httpx.ReadTimeout as exc:
            raise Refusal(504, "the server did not answer in time") from exc
        except httpx.HTTPError as exc:
            self._model = None
            raise overloaded("the server is not reachable; send the request again later") from exc
        if answer.status_code == 503:
            raise overloaded(_reason(answer) or "the server is overloaded; send the request again later")
        if answer.status_code == 400:
            reason = _reason(answer)
            position = re.match(r"image (\d+): ", reason)
            raise Refusal(400, reason or "the server refused the images", image=int(position[1]) if position else None)
        if answer.status_code != 200:
            raise Refusal(502, "the server failed to answer")
        return answer

    async def _response(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send a request, and once more if the connection breaks: the gateway closes kept connections during a rollout.

        An inference may be repeated, because it changes nothing.
        """
        with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):
            return await self._client.request(method, path, **arguments)
        return await self._client.request(method, path, **arguments)


def _model(config: Mapping[str, Any]) -> Model:
    parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
    return Model(
        label_set=label_set_from(parameters),
        bundle=parameters["gmmvit_bundle_sha256"],
        max_batch=int(config["max_batch_size"]),
        classifies=any(output["name"] == "logits" for output in config["output"]),
    )


def _request(images: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return (header in JSON, binary tensor): each image after its length, little-endian in 4 bytes."""
    tensor = b"".join(struct.pack("<I", len(image)) + image for image in images)
    header = {
        "inputs": [
            {
                "name": "IMAGE",
                "shape": [len(images), 1],
                "datatype": "BYTES",
                "parameters": {"binary_data_size": len(tensor)},
            }
        ],
        "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
    }
    return json.dumps(header).encode(), tensor


def _logits(body: bytes, header_length: int, images: int) -> NDArray[Any]:
    (output,) = json.loads(body[:header_length])["outputs"]
    rows, classes = map(int, output["shape"])
    if output["name"] != "logits" or output["datatype"] != "FP32" or rows != images:
        raise ValueError(f"expected logits of {images} images, got {output}")
    return np.frombuffer(body, np.float32, count=rows * classes, offset=header_length).reshape(rows, classes)


def _reason(answer: httpx.Response) -> str:
    """Return the text of Triton's error, without the name of the ensemble."""
    try:
        text = str(json.loads(answer.content)["error"])
    except (KeyError, TypeError, ValueError):
        return ""
    return re.sub(r"^(\[request id: [^\]]*\] )?(in ensemble '[^']*', )?", "", text)
