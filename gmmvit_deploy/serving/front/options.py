"""Options of the front, the program that answers ``POST /classify`` and ``/embed``, behind the gateway or alone.

This module imports only the standard library, so that the gateway can read the constants without the front's packages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL

FRONT_HEADER = "x-gmmvit-front"
"""The header with the secret that the gateway adds to each request; the front refuses requests without the secret."""
BUNDLE_HEADER = "x-gmmvit-bundle"
"""The header of an answer with the hash of the bundle that computed the answer."""
RUNNER_HEADER = "x-gmmvit-runner"
"""The header of an answer with the runner and the precision that computed it."""
CLASSIFY_PATH = "/classify"
EMBED_PATH = "/embed"
EMBEDDINGS_PATH = "/v1/embeddings"
"""The path of embeddings in the interface of OpenAI."""
CLASSIFY_PATHS, EMBED_PATHS, EMBEDDINGS_PATHS = (
    (path, f"{path}/") for path in (CLASSIFY_PATH, EMBED_PATH, EMBEDDINGS_PATH)
)
FRONT_PATHS = (*CLASSIFY_PATHS, *EMBED_PATHS, *EMBEDDINGS_PATHS)
"""The paths that the gateway passes to the front, besides those of `front_paths_of`."""
READY_PATH = "/ready"
ANSWERS_PATH = "/answers"
"""The path of the counts that the page shows."""
DEFAULT_CLASSIFY_PORT = 8080
"""The port of ``POST /classify`` without a gateway."""
DEFAULT_BODY_BYTES = 16 * 2**20
DEFAULT_BUFFERED_BYTES = 256 * 2**20
RETRY_AFTER_S = 1
"""The value of ``Retry-After`` with status 503, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """Options of the front.

    triton_url: the HTTP address of the Triton server, ``http://127.0.0.1:PORT``.
    metrics_url: the address of its metrics, whose counts of answers the page shows; "" without the counts.
    models: the names of the ensembles that clients may ask.
    max_body_bytes: the maximum size of a body; a larger one gets status 413.
    max_buffered_bytes: the maximum size of all bodies in memory; a further request gets status 503.
    max_requests: the maximum number of requests in progress; a further request gets status 503.
    body_timeout_s: the maximum time to receive a body, in seconds; after this time, the request gets status 408.
    """

    triton_url: str
    metrics_url: str = ""
    models: tuple[str, ...] = (DEFAULT_MODEL,)
    max_body_bytes: int = DEFAULT_BODY_BYTES
    max_buffered_bytes: int = DEFAULT_BUFFERED_BYTES
    max_requests: int = 512
    body_timeout_s: float = 30.0


def front_paths_of(models: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that name one of the models."""
    return tuple(f"{path}/{model}" for model in models for path in (CLASSIFY_PATH, EMBED_PATH))
