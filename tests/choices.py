"""Bundles with a choice for this machine, as ``gmmvit optimize`` writes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.cascades import read_cascade
from gmmvit_deploy.bundle.choices import Candidate, Choice, JudgedImages, Machine, write_choice
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.runtimes.runners.chosen import runtime_versions, this_machine
from gmmvit_deploy.runtimes.runners.open import graph_of

ANSWERS = {"probability": {"0.2-0.4": 300, "0.9-0.95": 200}, "margin": {"0-0.5": 500}}


def chosen_bundle(
    bundle: Bundle,
    path: Path,
    *names: str,
    machine: Machine | None = None,
    graph_sha256: str | None = None,
    versions: dict[str, str] | None = None,
) -> Bundle:
    """Copy a bundle, with runners that passed on this machine, best first.  Other arguments change what is recorded."""
    copied = open_bundle(shutil.copytree(bundle.path, path))
    candidates = [
        Candidate(
            runner=runner,
            passed=True,
            graph_sha256=graph_sha256 or graph.sha256,
            judged=Measured(value=0.99, low=0.97, high=1.0),
            threshold=read_cascade(copied, runner, graph.sha256).threshold if runner.cascade else None,
        )
        for runner in map(RunnerName.parse, names)
        for graph in [graph_of(copied, runner)]
    ]
    choice = Choice(
        machine=machine or this_machine(),
        goal="latency",
        batch=1,
        base=RunnerName("onnxruntime"),
        gate=Gate(keep_decisions=0.5),
        images=JudgedImages(
            source="folder:val",
            count=500,
            checked=500,
            sha256="ab",
            accuracy=None,
            copies=0,
            batches=(1, 16),
            answers=ANSWERS,
        ),
        candidates=(Candidate(runner=RunnerName("openvino", "int8"), passed=False, reason="slower"), *candidates),
        versions=runtime_versions() | (versions or {}),
        made_at="2030-01-31T00:00:00+00:00",
    )
    write_choice(path, choice)
    return copied
