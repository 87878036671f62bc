"""A server with as little shared memory as Docker gives a container: 64 MiB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from gmmvit_deploy import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from tests.inference.test_preprocess import encoded, photo
from tests.serving.commands import Serve

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

IMAGES = 64
SPEC = ViTSpec(
    image_size=224, patch_size=32, classes=5, dim=16, depth=1, heads=1, head_dim=16, mlp_dim=16, class_token=True,
    mask=MaskSpec(),
)  # fmt: skip


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Address of a server of which a batch of answers to large images fills more than half of the shared memory."""
    if os.geteuid() or shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("needs the right to mount a file system")
    (tmp_path / "vit.safetensors").write_bytes(bytes_from_model(model_from_spec(SPEC)))
    half = (0.5, 0.5, 0.5)
    options = ExportOptions(input_kind="tensor", mean=half, std=half, labels=tuple("abcde"))
    bundle_from_checkpoint(tmp_path / "vit.safetensors", tmp_path / "bundle", options)
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    before = ("unshare", "-m", "sh", "-c", script, "sh", sys.executable)
    with Serve(tmp_path / "bundle", "--log", tmp_path / "log", before=before) as running:
        yield running.ready()["grpc"]
        running.process.terminate()
        running.end()
    assert "/dev/shm has 64 MiB" in (tmp_path / "log").read_text()


def test_requests_that_do_not_fit_are_refused_and_others_answered(url: str) -> None:
    image = encoded(photo(450, 450), "JPEG")

    def asked(count: int) -> str:
        with TritonConnection(url) as connection:
            try:
                logits = connection.infer("gmmvit", "IMAGE", np.array([[image]] * count, dtype=object))
            except ServerError as exc:
                return str(exc)
            return f"{len(logits)} answers"

    torch.set_num_threads(1)
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(asked, [IMAGES] * 4), *pool.map(asked, [12] * 4)]
    assert all("would fill /dev/shm, which has 64 MiB" in answer for answer in answers[:4])
    assert set(answers[4:]) & {"12 answers"}
    assert asked(1) == "1 answers"
    assert asked(12) == "12 answers"
