"""Fixtures of the tests that start servers of their own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.serving.commands import Serve
from tests.serving.processes import wait_gone
from tests.serving.stand_in import write_stand_in


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
        if command.process.poll() is None:
            command.process.kill()
            command.process.communicate()
        assert wait_gone(str(command.path)) == {}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose only model returns its input at once."""
    models = write_stand_in(tmp_path_factory.mktemp("stand_in") / "models")
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running
