"""Read the images of a request: the body is an image, multipart/form-data with an image in each part, or JSON.

A body is received into memory, never into a file. `UploadBudget` bounds the bytes in memory; a request takes its
share before its body is received.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import FormParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from gmmvit_deploy.serving.front.options import RETRY_AFTER_S

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings quote what a client sent

MULTIPART = "multipart/form-data"
_OF_CURL = "application/x-www-form-urlencoded"
"""The type that curl names for --data-binary, and for -d, which removes line breaks and zero bytes of a file."""
_IMAGES = ("application/octet-stream", _OF_CURL)
"""Types of a body that is an image, besides image/*."""


class Refusal(Exception):  # noqa: N818 - a refused request is no error of the front
    """A request that the front refuses.

    status: of HTTP.  reason: for the client.  image: the position of the image that is the reason, or None.
    """

    def __init__(
        self, status: int, reason: str, *, image: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.image = image
        self.headers = dict(headers or {})


def overloaded(reason: str) -> Refusal:
    """Return the refusal of a request that the client may send again after `RETRY_AFTER_S`."""
    return Refusal(503, reason, headers={"Retry-After": str(RETRY_AFTER_S)})


class UploadBudget:
    """Counts the requests in progress, and the bytes of their bodies in memory.

    HAProxy limits both, but no longer counts a request whose client left while Triton computes its answer.
    """

    def __init__(self, max_bytes: int, max_requests: int) -> None:
        self._max_bytes, self._max_requests = max_bytes, max_requests
        self._bytes = self._requests = 0

    @contextmanager
    def taken(self, length: int) -> Iterator[None]:
        """Take the share of a body of ``length`` bytes.  Errors: Refusal, 503, when too little is left."""
        if self._requests >= self._max_requests:
            raise overloaded(f"{self._max_requests} requests are in progress; send the request again later")
        if self._bytes + length > self._max_bytes:
            raise overloaded("the bodies of other requests fill the memory; send the request again later")
        self._requests += 1
        self._bytes += length
        try:
            yield
        finally:
            self._requests -= 1
            self._bytes -= length


def boundary_of(request: Request) -> bytes:
    """Return the boundary of multipart/form-data; empty if the body is an image.  Errors: Refusal, 400 or 415."""
    parsed, options = parse_options_header(request.headers.get("content-type", "application/octet-stream"))
    kind = parsed.decode("latin-1").lower()
    if kind == MULTIPART:
        if boundary := options.get(b"boundary", b""):
            return boundary
        raise Refusal(400, f"content-type: {MULTIPART} needs a boundary")
    if not kind.startswith("image/") and kind not in _IMAGES:
        raise Refusal(
            415,
            f"content-type: expected image/*, application/octet-stream or {MULTIPART}, got {kind[:80] or 'no type'}",
        )
    return b""


def body_length(request: Request, max_bytes: int) -> int:
    """Return the length of the body that the client states.  Errors: Refusal, 411, 413 or 415."""
    if "content-encoding" in request.headers:
        raise Refusal(415, "compressed requests are refused")
    if "content-length" not in request.headers:
        raise Refusal(411, "the body needs a content-length, and must not be chunked")
    length = int(request.headers["content-length"])  # the parser of HTTP takes only digits
    if length > max_bytes:
        raise Refusal(413, f"the request is too large; the limit is {max_bytes} bytes")
    return length


async def receive_body(request: Request, length: int, timeout_s: float) -> bytes:
    """Receive a body of ``length`` bytes.  Errors: Refusal, 408 after ``timeout_s``, or 400."""
    try:
        async with asyncio.timeout(timeout_s):
            body = await request.body()
    except TimeoutError as exc:
        raise Refusal(408, f"the body did not arrive within {timeout_s:g} s", headers={"Connection": "close"}) from exc
    except ClientDisconnect as exc:
        raise Refusal(400, "the client closed the connection before the end of the body") from exc
    if len(body) != length:
        raise Refusal(400, f"the body has {len(body)} bytes, expected the {length} of the header Content-Length")
    if request.headers.get("content-type") == _OF_CURL and body and not any(byte in body for byte in b"\0\r\n"):
        what = f"the text {body.decode()!r}" if body.isascii() and len(body) < 200 else "a file without its line breaks"
        raise Refusal(400, f"expected an image, got {what}; did you mean curl --data-binary @photo.jpg?")
    return body


def images_from_body(body: bytes, boundary: bytes, max_images: int) -> list[bytes]:
    """Return the encoded images of a body.  boundary: that of `boundary_of`.  Errors: Refusal, 400."""
    images = _parts(body, boundary, max_images) if boundary else [body]
    if not images:
        raise Refusal(400, "the request has no image: expected a file in a part of multipart/form-data")
    for position, image in enumerate(images):
        if not image:
            raise Refusal(400, f"image {position}: the file is empty", image=position)
    return images


def require_json(request: Request) -> None:
    """Errors: Refusal, 415, for a body that is not JSON."""
    parsed, _ = parse_options_header(request.headers.get("content-type", ""))
    if parsed.lower() != b"application/json":
        raise Refusal(415, f"content-type: expected application/json, got {parsed.decode('latin-1')[:80] or 'no type'}")


def images_from_json(body: bytes, models: Mapping[str, tuple[int, int]]) -> tuple[str, list[bytes], str]:
    """Return (model, the images as base64 text, the encoding of the answer) of a request in OpenAI's form.

    The images are data URIs, which the server decodes.
    models: those that the request may name → (the largest number of images in a request, the length of their features).
    Errors: Refusal, 400, or 404 for another model.
    """
    # Lists and objects take many times the memory of their text, and the time of other requests. Base64 has none.
    most = max(max_images for max_images, _ in models.values())
    if (marks := sum(map(body.count, (b"[", b"{", b",")))) > 4 * most + 100:
        got = f"got a body with {marks} brackets and commas"
        raise Refusal(400, f"input: expected 1 to {most} images as data URIs, {got}")
    try:
        request = json.loads(body, parse_int=float)  # int takes no more than 4,300 digits
    except ValueError as exc:
        raise Refusal(400, f"the body is not valid JSON: {exc}"[:200]) from exc
    if not isinstance(request, dict):
        raise Refusal(400, "the body: expected a JSON object with input and model")
    request = {name: value for name, value in request.items() if value is not None}
    if unknown := sorted(request.keys() - {"input", "model", "encoding_format", "dimensions", "user"}):
        known = "expected only input, model, encoding_format, dimensions and user"
        raise Refusal(400, f"{unknown[0][:40]!r}: {known}")
    if missing := [name for name in ("input", "model") if name not in request]:
        raise Refusal(400, f"{missing[0]} is missing")
    model = request["model"]
    if not isinstance(model, str) or model not in models:
        raise Refusal(404, f"model: expected {' or '.join(map(repr, models))}, got {_shown(model)}")
    max_images, dimension = models[model]
    encoding = request.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise Refusal(400, f"encoding_format: expected float or base64, got {_shown(encoding)}")
    if request.get("dimensions", dimension) != dimension:
        raise Refusal(400, f"dimensions: expected {dimension}, the only length of this model's features")
    stated = request["input"]
    images: list[Any] = stated if isinstance(stated, list) else [stated]
    if not 1 <= len(images) <= max_images:
        raise Refusal(400, f"input: expected 1 to {max_images} images, got {len(images)}")
    for position, image in enumerate(images):
        if not isinstance(image, str) or image[:5].lower() != "data:":
            expected = "expected a data URI, such as data:image/jpeg;base64,/9j/…"
            raise Refusal(400, f"image {position}: {expected}, got {_shown(image)}", image=position)
    return model, [image.encode(errors="replace") for image in images], encoding  # JSON can hold half a surrogate pair


def _shown(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", float: "a number", bool: "a boolean", type(None): "null"}
    return repr(value[:40]) if isinstance(value, str) else kinds[type(value)]


def _parts(body: bytes, boundary: bytes, max_images: int) -> list[bytes]:
    images: list[bytes] = []
    ended: list[bool] = []

    def on_file(file: Any) -> None:
        if len(images) == max_images:
            raise Refusal(400, f"the request has more than {max_images} images, the maximum in a request")
        images.append(file.file_object.getvalue())

    def on_field(field: Any) -> None:
        name = (field.field_name or b"").decode("utf-8", errors="replace")[:40]
        meant = "write top into the address, as in /classify?top=3"
        if name != "top":
            meant = f"did you mean curl -F {name}=@photo.jpg?"
        got = "got a field without a file name"
        raise Refusal(400, f"part {len(images)} ({name!r}): expected a file, {got}; {meant}")

    config = {"MAX_MEMORY_FILE_SIZE": math.inf}  # no file is written
    try:
        parser = FormParser(MULTIPART, on_field, on_file, lambda: ended.append(True), boundary, config=config)
        parser.write(body)
        parser.finalize()
    except FormParserError as exc:
        raise Refusal(400, f"the body is not valid {MULTIPART}: {exc}") from exc
    if not ended:
        raise Refusal(400, f"the body is not valid {MULTIPART}: expected the closing boundary at its end")
    return images
