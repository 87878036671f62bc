"""The front takes images as files, and answers with labels or features as JSON.

    POST /classify        image, or multipart/form-data with several images
      → {"model": …, "bundle": …, "runner": …, "predictions": [[{"label": …, "index": …, "probability": …}, …], …]}
    POST /embed           the same
      → {"model": …, "bundle": …, "runner": …, "dimension": D, "features": [base64 of D float32, …]}
    POST /v1/embeddings   JSON with data URIs, in the form of OpenAI
      → {"object": "list", "model": …, "data": [{"object": "embedding", "index": 0, "embedding": …}, …], …}

With several models, the path names the model, as in /classify/cats; /v1/embeddings names it in its JSON.

A list of predictions for each image, in the order of the images. For a multi-label model, a prediction also has the
label's ``"threshold"``, and ``"present"``: true if the probability reaches it; all present labels are listed. A cascade
also answers ``"deferred"``: for each image, true if float32 computed it again.

A refused request gets ``{"error": …}``, with ``"image"``, the position of the image that is the reason, if the reason
is an image; for ``/v1/embeddings`` in the form of OpenAI. docs/pages/clients.md lists the statuses.

Behind a gateway, requests wait in the gateway, and need its secret. Without a gateway, the front listens on loopback,
admits only this machine (`_only_this_machine`), and also answers ``GET /`` with a page to drop an image on, and
``GET /answers`` with the counts that this page shows: those of Triton's metrics.

The front writes no file, and sends no traceback. The images are decoded and checked by Triton's preprocessing model.

As a program, it reads a line of JSON from stdin: the secret, the file descriptor of the listening socket, and the
options. The secret is not on the command line, which every user of the machine can read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import http.client
import io
import json
import logging
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.answer_counts import SURENESS
from gmmvit_deploy.inference.labels import DEFAULT_TOP
from gmmvit_deploy.serving._local_http import text_from_url
from gmmvit_deploy.serving._metric_text import samples_in
from gmmvit_deploy.serving.front._http import LimitedHttp
from gmmvit_deploy.serving.front._triton import Model, Triton
from gmmvit_deploy.serving.front._uploads import (
    Refusal,
    UploadBudget,
    body_length,
    boundary_of,
    images_from_body,
    images_from_json,
    receive_body,
    require_json,
)
from gmmvit_deploy.serving.front.options import (
    ANSWERS_PATH,
    BUNDLE_HEADER,
    CLASSIFY_PATH,
    CLASSIFY_PATHS,
    EMBED_PATH,
    EMBED_PATHS,
    EMBEDDINGS_PATH,
    EMBEDDINGS_PATHS,
    FRONT_HEADER,
    READY_PATH,
    RUNNER_HEADER,
    FrontOptions,
)
from gmmvit_deploy.serving.gateway.options import is_loopback

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MISSING = {
    "logits": f"the model has no classes, only features: send images with POST to {EMBED_PATH}",
    "features": f"the model has no features: send images with POST to {CLASSIFY_PATH}, or ask the operator to export "
    "the model again with gmmvit export CHECKPOINT -o BUNDLE --outputs both",
}
"""Output → why a request for it is refused if the model lacks it."""
_EXIT_TIMEOUT_S = 15
_MAX_CONNECTIONS = 1024
_log = logging.getLogger(__name__)
_Headers = Mapping[bytes, bytes]


def front_app(options: FrontOptions, secret: str | None) -> ASGIApp:
    """Return the ASGI application.  secret: as for `FrontProcess`; requests for readiness need none."""
    front = _Front(options)
    routes = [
        *(Route(path, front.classify, methods=["POST"]) for path in (*CLASSIFY_PATHS, f"{CLASSIFY_PATH}/{{model}}")),
        *(Route(path, front.embed, methods=["POST"]) for path in (*EMBED_PATHS, f"{EMBED_PATH}/{{model}}")),
        *(Route(path, front.embeddings, methods=["POST"]) for path in EMBEDDINGS_PATHS),
        Route(READY_PATH, front.ready, methods=["GET"]),
    ]
    of_page = [
        Route("/", front.page, methods=["GET"]),
        *(Route(path, front.answers, methods=["GET"]) for path in (ANSWERS_PATH, f"{ANSWERS_PATH}/{{model}}")),
    ]
    app = Starlette(
        routes=routes if secret else [*routes, *of_page],
        exception_handlers={Refusal: _refused, HTTPException: _not_routed, Exception: _failed},
        lifespan=front.lifespan,
    )
    app.router.redirect_slashes = False
    return _Guard(app, _only_gateway(secret) if secret else _only_this_machine)


class _Front:
    def __init__(self, options: FrontOptions) -> None:
        self._options = options
        self._budget = UploadBudget(options.max_buffered_bytes, options.max_requests)
        self._triton: Triton

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with Triton(self._options) as self._triton:
            yield

    async def ready(self, request: Request) -> JSONResponse:
        ready = await self._triton.ready()
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def page(self, request: Request) -> Response:
        models = [await self._triton.model(name) for name in self._options.models]
        if with_classes := tuple(model.name for model in models if "logits" in model.outputs):  # the page shows them
            return _page(with_classes if len(models) > 1 else ())
        raise Refusal(404, _MISSING["logits"])

    async def answers(self, request: Request) -> Response:
        """Answer kind → [{bucket, answers: a number, expected: a share of the judging images or null}, …]."""
        model = (await self._model_with("logits", request)).name
        try:
            text = await asyncio.to_thread(text_from_url, self._options.metrics_url)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise Refusal(503, "the server's metrics are not reachable") from exc
        counts, expected = (
            {(of["kind"], of["bucket"]): value for of, value in samples_in(text, name) if of["model"] == model}
            for name in ("gmmvit_answers_total", "gmmvit_expected_answers_ratio")
        )
        if not counts:
            raise Refusal(404, "the server counts no answers: only models of the python backend do")
        answer: dict[str, list[dict[str, Any]]] = {}
        for kind, bucket in (*SURENESS, *sorted(counts.keys() - {*SURENESS}, key=lambda key: -counts[key])):
            row = {"bucket": bucket, "answers": counts.get((kind, bucket), 0), "expected": expected.get((kind, bucket))}
            answer.setdefault(kind, []).append(row)
        return JSONResponse(answer)

    async def classify(self, request: Request) -> Response:
        top, boundary = _top(request), boundary_of(request)
        async with self._body_of(request) as body:
            model = await self._model_with("logits", request)
            images = images_from_body(body, boundary, model.max_batch)
            values = await self._triton.answers(model.name, images, ["logits", *model.outputs.keys() & {DEFERRED}])
        logits, deferred, labels = values["logits"], values.get(DEFERRED), model.label_set.labels
        if logits.shape[1] != len(labels):
            raise Refusal(502, "the server's model has changed; send the request again")
        try:
            guesses = [model.label_set.predictions(row, min(top, len(labels))) for row in logits]
        except ValueError as exc:
            raise Refusal(502, f"the server failed to answer: {exc}") from exc
        answer: dict[str, Any] = {"predictions": [[guess.to_json() for guess in row] for row in guesses]}
        if deferred is not None:
            answer["deferred"] = deferred[:, 0].tolist()
        return JSONResponse({**_described(model), **answer}, headers=_headers(model))

    async def embed(self, request: Request) -> Response:
        form, boundary = request.query_params.get("format", "base64"), boundary_of(request)
        if form not in ("base64", "list", "npy"):
            raise Refusal(400, f"format: expected base64, list or npy, got {form[:20]!r}")
        async with self._body_of(request) as body:
            model = await self._model_with("features", request)
            features = await self._features_of(model, images_from_body(body, boundary, model.max_batch))
        if form == "npy":
            file = io.BytesIO()
            np.save(file, features)
            return Response(file.getvalue(), media_type="application/octet-stream", headers=_headers(model))
        answer = {"dimension": features.shape[1], "features": _encoded(features, form)}
        return JSONResponse({**_described(model), **answer}, headers=_headers(model))

    async def embeddings(self, request: Request) -> Response:
        require_json(request)
        async with self._body_of(request) as body:
            served = {name: await self._triton.model(name) for name in self._options.models}
            sizes = {n: (m.max_batch, m.outputs["features"]) for n, m in served.items() if "features" in m.outputs}
            if not sizes:
                raise Refusal(400, _MISSING["features"])
            name, images, encoding = images_from_json(body, sizes)
            model = served[name]
            features = await self._features_of(model, images)
        vectors = enumerate(_encoded(features, encoding))
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in vectors]
        usage = {"prompt_tokens": 0, "total_tokens": 0}  # images have none
        answer = {"object": "list", "data": data, "model": model.name, "usage": usage}
        return JSONResponse(answer, headers=_headers(model))

    @asynccontextmanager
    async def _body_of(self, request: Request) -> AsyncIterator[bytes]:
        """Receive the body of a request; its share of the memory is taken inside the ``async with`` block."""
        length = body_length(request, self._options.max_body_bytes)
        with self._budget.taken(length):
            yield await receive_body(request, length, self._options.body_timeout_s)

    async def _model_with(self, output: str, request: Request) -> Model:
        """Return the model that the path names, or the only one.

        Errors: Refusal, 404 when the path names no model of several, or one that is not served; 400 when the model does
        not have the output.
        """
        models = self._options.models
        name = request.path_params.get("model", models[0] if len(models) == 1 else "")
        if name not in models:
            path = request.url.path.split("/")[1]
            named = f"there is no model {name[:64]!r}" if name else "the path names no model"
            able = [f"/{path}/{n}" for n in models if output in (await self._triton.model(n)).outputs]
            raise Refusal(404, f"{named}; expected {' or '.join(able) or 'another path'}")
        model = await self._triton.model(name)
        if output not in model.outputs:
            raise Refusal(400, _MISSING[output])
        return model

    async def _features_of(self, model: Model, images: list[bytes]) -> NDArray[Any]:
        """Return the features (images, D).  Errors: Refusal, 502 for values that JSON cannot hold."""
        features = (await self._triton.answers(model.name, images, ["features"]))["features"]
        if not np.isfinite(features).all():
            raise Refusal(502, "the server failed to answer: features that are not finite")
        return features


def _described(model: Model) -> dict[str, Any]:
    return {"model": model.name, "bundle": model.bundle, "runner": model.runner}


def _headers(model: Model) -> dict[str, str]:
    return {BUNDLE_HEADER: model.bundle, RUNNER_HEADER: model.runner}


def _encoded(features: NDArray[Any], form: str) -> list[Any]:
    """Return a row for each image: base64 of little-endian float32, or numbers."""
    if form == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in features]
    numbers: list[Any] = features.tolist()
    return numbers


@cache
def _page(models: tuple[str, ...]) -> HTMLResponse:
    """Return the page, which may run only its own script and style, and ask only this server.

    models: those among which the visitor chooses; empty for a single model.
    """
    html = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    options = "".join(f"<option>{escape(name)}</option>" for name in models)
    picker = f'<p><label for="model">Model</label> <select id="model">{options}</select></p>' if models else ""
    html = html.replace("<!-- the choice of a model -->", picker)
    own = {kind: re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL) for kind in ("script", "style")}
    hashes = {kind: " ".join(map(_hash, texts)) for kind, texts in own.items()}
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def _hash(text: str) -> str:
    """Return the hash of an inline script or style, as Content-Security-Policy lists it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _top(request: Request) -> int:
    """Return the number of predictions for each image, the query's ``top``."""
    text = request.query_params.get("top", str(DEFAULT_TOP))
    if not (text.isascii() and text.isdigit() and len(text) < 1000 and int(text) >= 1):
        raise Refusal(400, f"top: expected a whole number of at least 1, got {text[:20]!r}")
    return int(text)


def _answer(path: str, refusal: Refusal) -> JSONResponse:
    answer: dict[str, Any] = {"error": refusal.reason}
    if path in EMBEDDINGS_PATHS:  # OpenAI's clients show only error.message
        error = {"message": refusal.reason, "type": "invalid_request_error", "param": None, "code": None}
        answer = {"error": error}
    elif refusal.image is not None:
        answer["image"] = refusal.image
    return JSONResponse(answer, status_code=refusal.status, headers=refusal.headers)


def _refused(request: Request, refusal: Any) -> JSONResponse:
    return _answer(request.url.path, refusal)


def _not_routed(request: Request, exc: Any) -> JSONResponse:
    if exc.status_code == 405:
        reason = f"{request.method[:20]}: this path takes only {(exc.headers or {}).get('Allow', 'other methods')}"
    else:
        reason = f"there is no such path; send images with POST to {CLASSIFY_PATH}, {EMBED_PATH} or {EMBEDDINGS_PATH}"
    return _refused(request, Refusal(exc.status_code, reason, headers=exc.headers))


def _failed(request: Request, exc: Exception) -> JSONResponse:
    _log.error("the HTTP endpoint failed on a request: %s: %s", type(exc).__name__, exc)
    return _refused(request, Refusal(500, "the HTTP endpoint failed on this request"))


class _Guard:
    """Refuses a request of whose method, path and headers ``reason`` returns a text; "" admits the request."""

    def __init__(self, app: ASGIApp, reason: Callable[[str, str, _Headers], str]) -> None:
        self._app, self._reason = app, reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            reason = self._reason(scope["method"], scope["path"], dict(scope["headers"]))
            app = _answer(scope["path"], Refusal(403, reason)) if reason else app
        await app(scope, receive, send)


def _only_gateway(secret: str) -> Callable[[str, str, _Headers], str]:
    """Return the ``reason`` of a `_Guard` that admits requests with the secret, and requests for readiness."""
    expected = secret.encode()

    def reason(method: str, path: str, headers: _Headers) -> str:
        if path == READY_PATH or hmac.compare_digest(headers.get(FRONT_HEADER.encode(), b""), expected):
            return ""
        return "this port answers only the gateway"

    return reason


def _only_this_machine(method: str, path: str, headers: _Headers) -> str:
    """Return why a request does not come from a program or the page of this machine; "" if it does.

    Every page of the web that a browser of this machine shows can send requests to loopback. With DNS rebinding, a
    page's own name leads to loopback, so the header Host must name loopback. Other requests of pages that do more than
    read state their origin, or at least whether it is this server.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_loopback(_name(host)):
        return f"expected a Host header that names this machine, such as localhost, got {host[:80]!r}"
    if method in ("GET", "HEAD"):
        return ""
    origin = headers.get(b"origin", b"").decode("latin-1")
    site = headers.get(b"sec-fetch-site", b"none")
    if origin not in ("", f"http://{host}") or site not in (b"same-origin", b"none"):
        return "this server refuses requests of pages of another origin"
    return ""


def _name(host: str) -> str:
    """Return a Host header without its port."""
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def main() -> None:
    """Serve until SIGTERM; then answer the requests that were received, for at most 15 s."""
    settings = json.loads(sys.stdin.readline())
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="HTTP endpoint: %(message)s")
    for name in ("python_multipart", "uvicorn.error"):  # they log every malformed request
        logging.getLogger(name).setLevel(logging.ERROR)
    config = uvicorn.Config(
        front_app(FrontOptions(**settings["options"]), settings["secret"]),
        loop="uvloop",
        http=LimitedHttp,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=75,  # longer than the gateway keeps idle connections
        timeout_graceful_shutdown=_EXIT_TIMEOUT_S,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=settings["socket"])])


if __name__ == "__main__":
    main()
