"""The front: ``POST /classify`` takes images as files and answers with labels and probabilities as JSON.

    image, or multipart/form-data with several images
      → {"model": …, "bundle": …, "predictions": [[{"label": …, "index": …, "probability": …}, …], …]}

A list of predictions for each image, in the order of the images. For a multi-label model, a prediction also has the
label's ``"threshold"``, and ``"present"``: true if the probability reaches it; all present labels are listed.

A refused request gets ``{"error": …}``, with ``"image"``, the position of the image that is the reason, if the reason
is an image:

    400  bad image, too many images or pixels, bad ``top``     411  no content-length     413  body too large
    403  without the secret of the gateway                     415  no image, or a content-encoding
    404, 405  another path or method                           503  overload, with Retry-After
    408  the body did not arrive                               502, 504  the server failed, or did not answer

The front writes no file, and sends no traceback. The images are decoded and checked by Triton's preprocessing model.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gmmvit_deploy.serving.front.options import (
    BUNDLE_HEADER,
    CLASSIFY_PATH,
    FRONT_HEADER,
    READY_PATH,
    FrontOptions,
)
from gmmvit_deploy.serving.front.refusals import Refusal, overloaded
from gmmvit_deploy.serving.front.triton import Triton
from gmmvit_deploy.serving.front.uploads import Room, body_length, content_type, images_from_body, receive_body

__all__ = ["front_app"]

_DEFAULT_TOP = 5
_log = logging.getLogger(__name__)


def front_app(options: FrontOptions, secret: str) -> ASGIApp:
    """Return the ASGI application.

    secret: the value that the header `FRONT_HEADER` of each request must have, except of requests for readiness.
    """
    front = _Front(options)
    app = Starlette(
        routes=[
            Route(CLASSIFY_PATH, front.classify, methods=["POST"]),
            Route(READY_PATH, front.ready, methods=["GET"]),
        ],
        exception_handlers={Refusal: _refused, HTTPException: _not_routed, Exception: _failed},
        lifespan=front.lifespan,
    )
    return _OnlyGateway(app, secret)


class _Front:
    def __init__(self, options: FrontOptions) -> None:
        self._options = options
        self._room = Room(options)
        self._running: asyncio.Semaphore
        self._triton: Triton

    @property
    def lifespan(self) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
        @asynccontextmanager
        async def opened(app: Starlette) -> AsyncIterator[None]:
            self._running = asyncio.Semaphore(self._options.max_running)
            async with Triton(self._options) as self._triton:
                yield

        return opened

    async def ready(self, request: Request) -> JSONResponse:
        ready = await self._triton.ready()
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def classify(self, request: Request) -> JSONResponse:
        options = self._options
        _, boundary = content_type(request)
        length = body_length(request, options.max_body_bytes)
        with self._room.taken(length):
            body = await receive_body(request, length, options.body_timeout_s)
            return await self._answered(request, body, boundary)

    async def _answered(self, request: Request, body: bytes, boundary: bytes) -> JSONResponse:
        try:
            await asyncio.wait_for(self._running.acquire(), self._options.queue_timeout_s)
        except asyncio.TimeoutError as exc:
            raise overloaded(
                f"no answer could be computed within {self._options.queue_timeout_s:g} s; send the request again later"
            ) from exc
        try:
            model = await self._triton.model()
            if not model.classifies:
                raise Refusal(400, "the model has no classes; ask the server for its output features by gRPC or HTTP")
            top = _top(request, len(model.label_set.labels))
            images = images_from_body(body, boundary, model.max_batch)
            logits = await self._triton.logits(images)
        finally:
            self._running.release()
        predictions = [[guess.to_json() for guess in model.label_set.predictions(row, top)] for row in logits]
        answer = {"model": self._options.model, "bundle": model.bundle, "predictions": predictions}
        return JSONResponse(answer, headers={BUNDLE_HEADER: model.bundle})


class _OnlyGateway:
    """Refuses requests without the secret, before their bodies are received."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != READY_PATH:
            given = dict(scope["headers"]).get(FRONT_HEADER.encode(), b"")
            if not hmac.compare_digest(given, self._secret):
                refusal = _refused(Request(scope), Refusal(403, "this port answers only the gateway"))
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _top(request: Request, classes: int) -> int:
    """Return the number of predictions for each image, the query's ``top``.  Errors: Refusal, 400."""
    text = request.query_params.get("top", str(min(_DEFAULT_TOP, classes)))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= classes):
        raise Refusal(400, f"top: expected a number from 1 to {classes}, got {text[:20]!r}")
    return int(text)


def _refused(request: Request, exc: Any) -> JSONResponse:
    answer: dict[str, Any] = {"error": exc.reason}
    if exc.image is not None:
        answer["image"] = exc.image
    return JSONResponse(answer, status_code=exc.status, headers=exc.headers)


def _not_routed(request: Request, exc: Any) -> JSONResponse:
    if exc.status_code == 405:
        reason = f"{request.method[:20]}: this path takes only {(exc.headers or {}).get('Allow', 'other methods')}"
    else:
        reason = f"there is no such path; send images with POST to {CLASSIFY_PATH}"
    return JSONResponse({"error": reason}, status_code=exc.status_code, headers=exc.headers)


def _failed(request: Request, exc: Exception) -> JSONResponse:
    _log.error("the front failed on a request: %s: %s", type(exc).__name__, exc)
    return JSONResponse({"error": "the front failed on this request"}, status_code=500)
