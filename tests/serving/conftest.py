"""Fixtures of the tests that start servers of their own, and servers that several files of tests ask."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.serving.front.options import FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import Repository, add_to_repository, repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.inference.test_preprocess import png
from tests.serving.commands import Serve, wait_gone
from tests.serving.shared import Running
from tests.serving.stand_in import write_stand_in

REQUEST_PIXELS = 60_000_000
MAX_BYTES = 2**20
"""The largest body that `front` takes."""


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


@pytest.fixture(scope="session")
def front(server: Running) -> Iterator[FrontProcess]:
    """A front without a gateway."""
    with FrontProcess(FrontOptions(triton_url=server.http_url, max_body_bytes=MAX_BYTES), None) as running:
        running.wait_ready()
        yield running


def joined_repository(folder: Path, bundles: Mapping[str, Bundle], **options: Any) -> Path:
    """Write a repository with the models of several bundles.  Each bundle's models have its name.

    options: of `RepositoryOptions`.
    """
    models = folder / "models"
    models.mkdir()
    for name, bundle in bundles.items():
        add_to_repository(bundle, models, RepositoryOptions(name=name, **options))
    return models


@pytest.fixture
def serve(repository: Repository, tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Starts ``gmmvit serve`` on a copy of the repository, whose path identifies its processes."""
    started = []

    def start(*arguments: str) -> Serve:
        path = tmp_path / f"models-{len(started)}"
        shutil.copytree(repository.path, path)
        started.append(Serve(path, *arguments))
        return started[-1]

    yield start
    for command in started:
        command.kill()
        wait_gone(str(command.path))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose only model returns its input at once."""
    models = write_stand_in(tmp_path_factory.mktemp("stand_in") / "models")
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running
