"""Run a benchmark script in the process of the tests."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable

import pytest

from benchmarks.shared.places import BENCHMARKS
from gmmvit_deploy.kernels.libraries import onnxruntime_library

NEEDS_KERNELS = pytest.mark.skipif(onnxruntime_library()[0] is None, reason="our kernels are not available here")
Run = Callable[..., None]


@pytest.fixture
def run() -> Run:
    """Run a script with its arguments in this process, so that imports and exports happen only once."""

    def run(name: str, *arguments: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *arguments])
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")

    return run
