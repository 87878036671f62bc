"""Run a worker process for a checkout of the project: export and run programs at the requests of the parent process.

`benchmarks.shared.checkouts` starts this script with the checkout at the front of PYTHONPATH. Requests and answers are
lines of JSON. `_PLACES` lists the modules that may define a name, because checkouts differ in age.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Python puts this file's folder first; remove it so that modules are imported from the checkout only.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402 - the path comes first

_PLACES: dict[str, tuple[str, ...]] = {
    "preset_spec": ("gmmvit_deploy.models.families", "gmmvit_deploy.families"),
    "model_from_spec": ("gmmvit_deploy.models.families", "gmmvit_deploy.families"),
    "released_state_dict": ("gmmvit_deploy.checkpoints.loading",),
    "MaskSpec": ("gmmvit_deploy.models.specs", "gmmvit_deploy.specs"),
    "ExportOptions": ("gmmvit_deploy.exporting.options", "gmmvit_deploy.export.options"),
    "bundle_from_checkpoint": (
        "gmmvit_deploy.exporting.bundle_from_checkpoint",
        "gmmvit_deploy.export.bundle_from_checkpoint",
    ),
    "open_bundle": ("gmmvit_deploy.bundle.artifacts", "gmmvit_deploy.artifacts"),
    "open_images": ("gmmvit_deploy.runtimes.programs.image_batches", "gmmvit_deploy.runtime.image_batches"),
    "variant_from_bundle": ("gmmvit_deploy.exporting.variants", "gmmvit_deploy.export.variants"),
    "open_runner": ("gmmvit_deploy.runtimes.runners.open", "gmmvit_deploy.runners.open"),
}
"""Name → modules that may define the name; the modules of newer checkouts come first."""


def imported(name: str) -> Any:
    """Import a name from the checkout.  Errors: ImportError when no module of `_PLACES` defines the name."""
    for module in _PLACES[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    places = ", ".join(_PLACES[name])
    raise ImportError(f"expected {name} in a module of {places}; add another module to {Path(__file__).name}")


def opened(bundle: Any, runtime: str, precision: str) -> Any:
    """Open a runner: OpenVINO with our kernels where they compute a part of the checkout's graph, or ONNX Runtime."""
    if runtime == "openvino":
        try:
            return imported("open_runner")("openvino+kernels", bundle, precision=precision)
        except Exception as exc:
            if "our kernel takes no attention" not in str(exc):
                raise
    return imported("open_runner")(runtime, bundle, precision=precision)


class Worker:
    """The requests: each method takes the fields of a request, and returns the fields of the answer."""

    def __init__(self) -> None:
        self._runner: Any = None
        self._image_shape: tuple[int, ...] = ()
        self._inputs: dict[tuple[int, int], np.ndarray] = {}

    def where(self) -> dict[str, Any]:
        """Return the path of the imported package."""
        return {"path": importlib.import_module("gmmvit_deploy").__file__}

    def checkpoint(self, family: str, path: str) -> dict[str, Any]:
        """Write a checkpoint as the paper authors' code does: GMM with K = 5, 32×32, 10 classes, random weights."""
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

    def convert(self, bundle: str, precision: str, images: str) -> dict[str, Any]:
        """Write a quantised graph into the bundle.  images: a .npy file with batches of the graph's input."""
        opened_bundle = imported("open_bundle")(Path(bundle))
        calibration = imported("open_images")(opened_bundle, images, limit=2**20)
        imported("variant_from_bundle")(opened_bundle, precision, calibration=calibration)
        return {}

    def load(self, bundle: str, runtime: str, precision: str) -> dict[str, Any]:
        """Load the program again, so that the weights have another place in memory."""
        if self._runner is not None:
            self._runner.close()
        opened_bundle = imported("open_bundle")(Path(bundle))
        self._image_shape = tuple(opened_bundle.input_shape)
        self._runner = opened(opened_bundle, runtime, precision)
        return {"settings": {name: str(value) for name, value in self._runner.settings.items()}}

    def run(self, batch: int, seed: int, repeats: int, untimed_s: float) -> dict[str, Any]:
        """Run the program untimed for ``untimed_s`` seconds, then ``repeats`` times; return the mean ms and the last
        logits.
        """
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
    os.dup2(2, 1)  # libraries may print to stdout, which carries the answers
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
