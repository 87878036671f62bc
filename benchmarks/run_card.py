"""What a benchmark ran on: written beside every result, so that a number can be judged later."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import Any

from gmmvit_deploy.bench.machine import cpu_name

PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy")


def start(script: str, **settings: Any) -> dict[str, Any]:
    """Note the machine and its load before the run."""
    return {
        "script": script,
        "settings": settings,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "started": time.time(),
    }


def finish(card: dict[str, Any]) -> dict[str, Any]:
    """Add the load after the run and how long it took."""
    started = card.pop("started")
    return {**card, "load_after": os.getloadavg()[0], "seconds": round(time.time() - started, 1)}
