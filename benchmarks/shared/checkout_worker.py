"""One checkout of the project in a process of its own: exports and runs programs when its parent asks for it.

Started by `benchmarks.shared.checkouts` with the checkout at the front of PYTHONPATH. A request is a line of JSON on
stdin, its answer a line of JSON on stdout. Everything is imported from the checkout, at whichever of the places in
`_PLACES` its layout has it: a checkout of another layout takes another place there, and no other change.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Python put this file's folder first; the checkout's modules alone shall be seen.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402 - the path comes first

_PLACES: dict[str, tuple[str, ...]] = {
    "preset_spec": ("gmmvit_deploy.families", "gmmvit_deploy.presets"),
    "model_from_spec": ("gmmvit_deploy.families", "gmmvit_deploy.models.build"),
    "released_state_dict": ("gmmvit_deploy.checkpoints.loading", "gmmvit_deploy.checkpoints.released"),
    "MaskSpec": ("gmmvit_deploy.specs",),
    "ExportOptions": ("gmmvit_deploy.export.bundle_from_checkpoint",),
    "bundle_from_checkpoint": ("gmmvit_deploy.export.bundle_from_checkpoint",),
    "open_bundle": ("gmmvit_deploy.artifacts",),
    "open_runner": (
        "gmmvit_deploy.runners",
        "gmmvit_deploy.runners.open",
        "gmmvit_deploy.runners.opening",
        "gmmvit_deploy.runners.named",
        "gmmvit_deploy.parity.runners",
    ),
}
"""Name → modules that may have it, those of newer layouts before those of older ones where both could exist."""


def imported(name: str) -> Any:
    """Import what a checkout has under this name.  Errors: ImportError, with every module that was tried."""
    for module in _PLACES[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(_PLACES[name])}: add its module to {Path(__file__).name}")


def opened(bundle: Any, runtime: str) -> Any:
    """A float32 runner with our kernels: ``<runtime>+kernels``, or in older checkouts the runtime's own name."""
    try:
        return imported("open_runner")(f"{runtime}+kernels", bundle)
    except Exception as exc:
        if "is not known" not in str(exc):
            raise
    runner = imported("open_runner")(runtime, bundle)
    attention = runner.settings.get("attention", "")
    if not attention.startswith("our own"):
        raise RuntimeError(f"{runtime}: expected our own attention kernel, got {attention!r}")
    return runner


class Worker:
    """The checkout's answers: each method takes a request's fields and returns the answer's."""

    def __init__(self) -> None:
        self._runner: Any = None
        self._image_shape: tuple[int, ...] = ()
        self._inputs: dict[tuple[int, int], np.ndarray] = {}

    def where(self) -> dict[str, Any]:
        """path: of the package that is imported."""
        return {"path": importlib.import_module("gmmvit_deploy").__file__}

    def checkpoint(self, family: str, path: str) -> dict[str, Any]:
        """Write a checkpoint as the released training code would, K = 5, 32×32, 10 classes, random weights."""
        import torch

        torch.manual_seed(0)
        mask = imported("MaskSpec")(kind="gmm", kernels=5)
        model = imported("model_from_spec")(imported("preset_spec")(family, classes=10, image_size=32, mask=mask))
        torch.save({"model_state_dict": imported("released_state_dict")(model.eval())}, path)
        return {}

    def export(self, checkpoint: str, bundle: str, max_batch: int) -> dict[str, Any]:
        options = imported("ExportOptions")(input_kind="tensor", max_batch=max_batch)
        imported("bundle_from_checkpoint")(Path(checkpoint), Path(bundle), options)
        return {}

    def load(self, bundle: str, runtime: str) -> dict[str, Any]:
        """Load the program anew: its weights come to lie elsewhere in memory."""
        if self._runner is not None:
            self._runner.close()
        found = imported("open_bundle")(Path(bundle))
        self._image_shape = tuple(found.input_shape)
        self._runner = opened(found, runtime)
        return {"settings": {name: str(value) for name, value in self._runner.settings.items()}}

    def run(self, batch: int, seed: int, repeats: int, untimed_s: float) -> dict[str, Any]:
        """ms: of one run, the mean of ``repeats`` after ``untimed_s`` seconds of untimed runs.  logits: of the last."""
        images = self._images(batch, seed)
        until = time.perf_counter() + untimed_s
        logits = self._runner.run(images)
        while time.perf_counter() < until:
            self._runner.run(images)
        start = time.perf_counter()
        for _ in range(repeats):
            logits = self._runner.run(images)
        return {"ms": (time.perf_counter() - start) / repeats * 1e3, "logits": np.asarray(logits).tolist()}

    def _images(self, batch: int, seed: int) -> np.ndarray:
        if (batch, seed) not in self._inputs:
            images = np.random.default_rng(seed).standard_normal((batch, *self._image_shape), dtype=np.float32)
            self._inputs = {(batch, seed): images}
        return self._inputs[batch, seed]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("ask"))(**request)
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
