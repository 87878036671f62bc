"""`runners.json`: an entry for each kind of machine, outside the bundle's hash."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.choices import (
    CHOICES_FILE,
    Candidate,
    Choice,
    JudgedImages,
    Machine,
    read_choices,
    write_choice,
)
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.intervals import Measured

CHOICE = Choice(
    machine=Machine(cpu="A processor", cores=2),
    goal="latency",
    batch=1,
    base=RunnerName("onnxruntime"),
    gate=Gate(accuracy=0.99),
    images=JudgedImages(
        source="folder:val",
        count=500,
        checked=128,
        sha256="ab",
        accuracy=0.8,
        copies=0,
        batches=(1, 16),
        answers={"margin": {"0-0.5": 500}},
    ),
    candidates=(
        Candidate(
            runner=RunnerName.parse("openvino+kernels:int8-static"),
            graph_sha256="cd",
            passed=True,
            accuracy=0.9,
            judged=Measured(value=0.995, low=0.98, high=1.01),
            images_to_settle=4000,
            speed=Measured(value=2.0, low=1.9, high=2.1),
        ),
        Candidate(runner=RunnerName("onnxruntime", "bf16"), passed=False, reason="ONNX Runtime has no bf16"),
    ),
    versions={"openvino": "1"},
    made_at="2030-01-01T00:00:00Z",
)

EARLIER = json.dumps({"format": 1, "machines": [asdict(CHOICE)]}).replace(', "batches": [1, 16]', "")
"""Of a judgement that did not state its batches."""


def test_an_entry_replaces_only_that_of_its_kind_of_machine(bundle: Bundle, tmp_path: Path) -> None:
    """The other machines' entries stay, and the bundle stays the same bundle."""
    path = tmp_path / "bundle"
    shutil.copytree(bundle.path, path)
    other = replace(CHOICE, machine=Machine(cpu="A processor", cores=2, gpu="A GPU"))
    again = replace(CHOICE, goal="throughput", batch=8)
    for entry in (CHOICE, other, again):
        write_choice(path, entry)
    assert read_choices(path) == ((other, again), "")
    assert open_bundle(path).sha256 == bundle.sha256


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1, "machines": [{"machine": {}}]}', EARLIER])
def test_a_file_that_cannot_be_read_is_ignored_with_a_reason(text: str, tmp_path: Path) -> None:
    """A file of another program or version stops nothing."""
    (tmp_path / CHOICES_FILE).write_text(text)
    entries, why = read_choices(tmp_path)
    assert entries == ()
    assert f"{CHOICES_FILE} is not used" in why
    assert f"type gmmvit optimize {tmp_path} to write it again" in why
    write_choice(tmp_path, CHOICE)
    assert read_choices(tmp_path) == ((CHOICE,), "")
    assert (tmp_path / f"{CHOICES_FILE}.old").read_text() == text


def test_a_gate_of_nan_is_none(tmp_path: Path) -> None:
    """Every value would pass it."""
    write_choice(tmp_path, CHOICE)
    text = (tmp_path / CHOICES_FILE).read_text().replace('"accuracy": 0.99', '"accuracy": NaN')
    (tmp_path / CHOICES_FILE).write_text(text)
    entries, why = read_choices(tmp_path)
    assert entries == ()
    assert "expected a share below 1, such as 0.98, got nan" in why
