"""``gmmvit train``: networks that classify digits, files that export without options, and runs that were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gmmvit_deploy.artifacts import open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.data.open import open_data
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtime.triton import DEFAULT_MODEL
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.cli.terminal import gmmvit_here
from tests.conftest import FREE_PORTS

QUICK = ["--recipe", "light", "--padding", "0", "--batch", "16", "--rate", "1e-3", "--image-size", "8"]
NETWORKS = {
    "preset": ["--preset", "vit_d6"],
    "timm": ["--model", "test_vit", "--model-args", '{"patch_size": 2}', "--channels", "1"],
}


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.server
@pytest.mark.export
@pytest.mark.parametrize("network", NETWORKS)
def test_trained_digits_are_exported_and_served(tmp_path: Path, network: str) -> None:
    """Export and server get no value but the checkpoint."""
    trained = tmp_path / "trained"
    words = ["train", "-o", trained, "--data", "digits", "--mask", "gmm", "--epochs", "1", *NETWORKS[network], *QUICK]
    answer = gmmvit_here(*words, "--json")
    assert answer.status == 0, answer.err
    result = json.loads(answer.out)
    assert result["accuracy"] > 0.5
    bundle = bundle_from_checkpoint(trained / "checkpoint.pth", tmp_path / "bundle", ExportOptions())
    assert len(bundle.manifest.masks) == 6
    assert bundle.manifest.labels == tuple("0123456789")
    held_out = open_data("digits")
    files = []
    for index in range(len(held_out)):
        files.append(tmp_path / f"{index}.png")
        files[-1].write_bytes(held_out.encoded(index))
    repository = repository_from_bundle(bundle, tmp_path / "models")
    with (
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as server,
        TritonClassifier(server.grpc_url, model=DEFAULT_MODEL) as client,
    ):
        answers = classify_files(client, files, top=1)
    right = [answers[index].predictions[0].label == str(held_out.label(index)) for index in range(len(held_out))]
    assert np.mean(right) == pytest.approx(result["accuracy"], abs=1e-9)
