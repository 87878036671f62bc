"""Servers with little shared memory, such as the 64 MiB that Docker gives a container."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from gmmvit_deploy import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from tests.haproxy import needs_haproxy
from tests.inference.test_preprocess import encoded, photo
from tests.serving.commands import Serve
from tests.serving.gateways import KEY, Stub, binary_request, grpc_request, key_file, request

pytestmark = pytest.mark.integration

IMAGES = 64
INFER = "/v2/models/gmmvit_network/infer"
SPEC = ViTSpec(
    image_size=224, patch_size=32, classes=5, dim=16, depth=1, heads=1, head_dim=16, mlp_dim=16, class_token=True,
    mask=MaskSpec(),
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A bundle whose inputs have 602 kB."""
    (tmp_path / "vit.safetensors").write_bytes(bytes_from_model(model_from_spec(SPEC)))
    half = (0.5, 0.5, 0.5)
    options = ExportOptions(input_kind="tensor", mean=half, std=half, labels=tuple("abcde"))
    return bundle_from_checkpoint(tmp_path / "vit.safetensors", tmp_path / "bundle", options).path


def with_shared_memory(mib: int) -> tuple[str, ...]:
    """Return the begin of a command that runs Python with this much shared memory."""
    if os.geteuid() or shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("needs the right to mount a file system")
    script = f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$@"'
    return ("unshare", "-m", "sh", "-c", script, "sh", sys.executable)


@pytest.fixture
def url(path: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a server of which a batch of answers to large images fills more than half of the shared memory."""
    with Serve(path, "--log", tmp_path / "log", before=with_shared_memory(64)) as running:
        yield running.ready()["grpc"]
        running.process.terminate()
        running.end()
    assert "/dev/shm has 64 MiB" in (tmp_path / "log").read_text()


@pytest.mark.nightly
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


@needs_haproxy
def test_no_answer_of_the_gateway_names_the_memory_of_the_server(path: Path, tmp_path: Path) -> None:
    """Triton's answer to a tensor that does not fit into the shared memory names the region (CVE-2025-23320)."""
    tensors = np.zeros((IMAGES, 3, 224, 224), np.float32)  # of which a single one fits
    message = grpc_request("tensor", tensors)
    message.inputs[0].datatype = "FP32"
    body, headers = binary_request("tensor", tensors, "FP32")
    limits = ("--max-body", str(2 * tensors.nbytes), "--in-flight", "16")
    with Serve(
        path, "--gateway", "--keys", key_file(tmp_path), *limits, "--log", tmp_path / "log",
        before=with_shared_memory(64),
    ) as running:  # fmt: skip
        said = running.ready()
        command = Path(f"/proc/{said['pid']}/cmdline").read_text()
        (port,) = re.findall("--http-port=([0-9]+)", command)

        def http(url: str, key: str | None = KEY) -> bytes:
            return request(url, INFER, body, headers=headers, key=key).body

        def grpc_call(url: str, key: str | None = KEY) -> bytes:
            with Stub(url, key=key) as stub:
                try:
                    return str(stub.call("ModelInfer", message)[0].model_name).encode()
                except grpc.RpcError as exc:
                    return str(exc.details()).encode()

        def until(text: bytes, ask: Callable[[str], bytes], url: str) -> list[bytes]:
            """Ask four times at once, until an answer has the text, and return all answers."""
            answers: list[bytes] = []
            with ThreadPoolExecutor(4) as pool:
                while not any(text in answer for answer in answers):
                    answers += pool.map(ask, [url] * 4)
            return answers

        until(b"gmmvit-run-serve", http, f"http://127.0.0.1:{port}")
        answers = until(b"is full", http, said["http"]) + until(b"is full", grpc_call, said["grpc"])
        answers += [http(said["http"], None), grpc_call(said["grpc"], None)]
        image, metrics = encoded(photo(450, 450), "JPEG"), said["metrics"].removesuffix("/metrics")
        for key in (KEY, None):
            answers.append(request(said["http"], "/classify", image, key=key).body)
            answers.append(request(said["http"], "/v2/models/gmmvit_network/generate", b"{}", key=key).body)
            answers.append(request(metrics, "/metrics", key=key).body)
    assert not [answer for answer in answers if b"gmmvit-run-serve" in answer]
