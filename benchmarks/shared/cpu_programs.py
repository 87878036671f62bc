"""Load our programs in OpenVINO with our kernels, and straight programs in OpenVINO.

A program without our kernels is never timed under the name of a runner with kernels (`runner_of`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.interleaved import Program
from benchmarks.shared.places import BENCHMARKS, why_failed
from gmmvit_deploy.extras import require
from gmmvit_deploy.inference.cores import cpu_features
from gmmvit_deploy.inference.openvino_kernels import Kernels
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.inference.precision import SPECS, Precision
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph

HAS_BF16 = "avx512_bf16" in cpu_features()

RUNNERS: dict[str, Precision] = {"openvino+kernels": "fp32"}
"""Name of a runner of the float32 graph, as for `open_runner` → precision of the runner's matrix products."""
if HAS_BF16:
    RUNNERS["openvino+kernels:bf16"] = "bf16"


def cpu_program(path: Path, runner: str, precision: Precision) -> Program:
    """Load a new copy of a graph in OpenVINO, with our kernels if ``runner`` has ``+kernels``."""
    ours = required_kernels(path, precision) if "+kernels" in runner else None
    return OpenVinoProgram(str(path), hint=SPECS[precision].openvino, kernels=ours).run


def runner_of(path: Path, runner: str, precision: Precision) -> tuple[str, str]:
    """Return (the runner that a user of this graph runs, why it has no kernels).

    The name loses ``+kernels`` if our kernels compute no part of the graph.  Errors: SystemExit without our kernels.
    """
    library, why = openvino_library()
    if library is None:
        raise SystemExit(f"{path.name} in {runner} cannot be measured: {why}")
    kernels, why = kernels_for_graph(path, precision)
    return (runner, "") if kernels is not None else (runner.replace("+kernels", ""), why)


def straight_openvino(path: Path, precision: Precision) -> Program:
    """Load a graph in OpenVINO as users do: the whole batch at once, compiled for each size, without our kernels."""
    openvino = require("openvino", package="openvino", extra="openvino")
    core = openvino.Core()
    compiled: dict[int, Any] = {}

    def run(images: np.ndarray) -> np.ndarray:
        batch = len(images)
        if batch not in compiled:
            model = core.read_model(str(path))
            model.reshape([batch, *images.shape[1:]])
            settings = {"INFERENCE_PRECISION_HINT": SPECS[precision].openvino}
            compiled[batch] = core.compile_model(model, "CPU", settings)
        logits: np.ndarray = compiled[batch](images)[0]
        return logits

    core.compile_model(core.read_model(str(path)), "CPU")  # so that a graph that cannot be compiled fails here
    return run


def nncf_in_openvino(path: Path, image_shape: tuple[int, ...], python: str, images: int = 300) -> Program:
    """Quantise a straight export with NNCF, calibrated by normally distributed images as ours is, and load it.

    python: the Python that has NNCF.  images: as many as NNCF takes by default.  Errors: RuntimeError when NNCF fails.
    """
    calibration, output = path.with_name("images.npy"), path.with_name("nncf.xml")
    np.save(calibration, np.random.default_rng(0).standard_normal((images, *image_shape), dtype=np.float32))
    script = BENCHMARKS / "shared" / "int8_peers.py"
    if why := why_failed([python, script, "nncf_default", path, calibration, output]):
        raise RuntimeError(why)
    return straight_openvino(output, "fp32")


def required_kernels(path: Path, precision: Precision) -> Kernels:
    """Return our kernels for a graph in OpenVINO.  Errors: SystemExit when they are not available."""
    kernels, why = kernels_for_graph(path, precision)
    if kernels is None:
        raise SystemExit(f"{path.name} in openvino+kernels:{precision} cannot be measured: {why}")
    return kernels
