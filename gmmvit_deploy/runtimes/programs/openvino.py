"""Choose the settings and this project's CPU kernels with which OpenVINO runs a graph on the CPU.

The data type in which OpenVINO computes is always set explicitly: OpenVINO's default is never used.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gmmvit_deploy.extras import require
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.openvino_kernels import Kernels, kernels_from
from gmmvit_deploy.inference.openvino_program import UNUSED
from gmmvit_deploy.inference.precision import OPENVINO_PRECISIONS, SPECS, Precision
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library


def why_no_openvino(precision: Precision, *, dynamic: bool = False) -> str:
    """Return why OpenVINO cannot compute in this precision on this machine's CPU; "" if it can.

    dynamic: True for an int8 graph in the dynamic form. Without VNNI, OpenVINO computes its products in float32.
    """
    if precision not in OPENVINO_PRECISIONS:
        return f"openvino: computes in {', '.join(OPENVINO_PRECISIONS)}, not in {precision}"
    if find_spec("openvino") is None:
        return "openvino: not installed; type pip install 'gmmvit-deploy[openvino]'"
    if SPECS[precision].projection == "int8" and not dynamic and (saturates := int8_saturates()):
        return f"openvino: {saturates}"
    if SPECS[precision].openvino == "bf16" and not has_bf16():
        return "openvino: this CPU has no bf16"
    return ""


def has_bf16() -> bool:
    """Return whether OpenVINO computes in bf16 on this CPU.  Errors: MissingDependencyError without OpenVINO."""
    openvino = require("openvino", package="openvino", extra="openvino")
    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def read_graph(path: Path) -> Any:
    """Read an ONNX file as an ``openvino.Model``.

    Errors: RuntimeError when OpenVINO cannot read the file.  MissingDependencyError when OpenVINO is not installed.
    """
    openvino = require("openvino", package="openvino", extra="openvino")
    return openvino.Core().read_model(str(path))


def our_kernels(precision: Precision) -> tuple[Kernels | None, str]:
    """Load this project's CPU kernels for OpenVINO; the first call on a machine compiles them, in some seconds.

    Returns (kernels for `OpenVinoProgram`, the data type in which they compute attention) or (None, the reason).
    Errors: MissingDependencyError when OpenVINO is not installed.
    """
    library, why = openvino_library()
    return (None, why) if library is None else kernels_from(library, SPECS[precision].attention)


def kernels_for_graph(path: Path, precision: Precision) -> tuple[Kernels | None, str]:
    """Load the kernels as `our_kernels` does; (None, the reason) also if they compute no part of this ONNX file."""
    kernels, why = our_kernels(precision)
    if kernels is None:
        return None, why
    openvino = require("openvino", package="openvino", extra="openvino")
    try:
        model = read_graph(path)
    except RuntimeError as exc:  # the caller gets the same error when OpenVINO compiles the graph
        return None, f"{path.name}: OpenVINO {openvino.__version__} cannot read this graph: {exc}"
    fused, attentions = kernels.fuse_attention(model)
    if fused + kernels.fuse_norms(model):
        return kernels, why
    return None, UNUSED.format(attentions)
