"""Servers that several files of tests ask."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.test_preprocess import png

REQUEST_PIXELS = 60_000_000


def flat_png(width: int, height: int) -> bytes:
    """A PNG of many pixels in few bytes."""
    compressor = zlib.compressobj(1)
    row = bytes(1 + 3 * width)
    parts = [compressor.compress(row) for _ in range(height)]
    return png(width, height, b"".join([*parts, compressor.flush()]))


@pytest.fixture(scope="session")
def limited_server(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server that takes 60 million pixels in a request; the large images of two requests wait."""
    path = tmp_path_factory.mktemp("limited") / "models"
    repository_from_bundle(bundle, path, RepositoryOptions(request_pixels=REQUEST_PIXELS))
    with TritonServer(path, options=ServerOptions(**FREE_PORTS)) as running:
        yield running
