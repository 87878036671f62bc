"""A bundle of a user's own class, exported once, and a process without permissions for every test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.conftest import cifar_options
from tests.models.families.custom.own_files import ARGUMENTS, LABELS, forget_files, own_file, save_weights


@dataclass(frozen=True)
class OwnBundle:
    """A bundle, the Python file that it was exported with, and the network that was saved."""

    bundle: Bundle
    source: Path
    network: torch.nn.Module

    @property
    def model(self) -> str:
        return f"{self.source}:Net"

    def runs(self) -> int:
        """Return how many times the file ran."""
        path = self.source.with_name("runs")
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(scope="session")
def own_bundle(tmp_path_factory: pytest.TempPathFactory) -> OwnBundle:
    folder = tmp_path_factory.mktemp("own_class")
    source = own_file(folder)
    network = save_weights(source, folder / "net.pth", prefix="module.", **ARGUMENTS)
    hints = LoadHints(model=f"{source}:Net", model_args=ARGUMENTS, image_size=16, channels=3)
    with pytest.MonkeyPatch.context() as patch:
        forget_files(patch)
        bundle = bundle_from_checkpoint(
            folder / "net.pth",
            folder / "bundle",
            cifar_options(labels=tuple(LABELS.split(",")), max_batch=9, resize="stretch-bilinear"),
            hints=hints,
        )
    return OwnBundle(bundle, source, network)


@pytest.fixture(autouse=True)
def _no_permissions(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_files(monkeypatch)
