"""Take a trained vision transformer with masked attention to production.

    checkpoint ──load──> model ──fold──> folded model ──export──> bundle ──write──> Triton repository ──serve──> logits

Folding computes every mask once and stores the mask in the model as a constant. Each attention then has the form
softmax(S ∘ M + B) V with the scores S = Q Kᵀ. The mask M and the bias B are constants, and ∘ multiplies elementwise.
A bundle is the folder that the export writes. The names of `_FACE` are imported on first use, so importing the package
imports no heavy dependency. Type checkers read them in ``__init__.pyi``.
"""

import os
import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Packages that report their use over the network are told not to, before they are imported. Programs that this package
# starts, such as Triton, inherit the variables. A user who has set a variable decides.
for _variable, _value in {
    "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime, in its wheels for Linux too
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, of transformers and timm
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_variable, _value)
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None: its import fails

_FACE = {
    "ExportOptions": "export.options",
    "LoadHints": "models.sources.hints",
    "OptimizeOptions": "optimize.run",
    "ParityOptions": "parity.options",
    "bundle_from_checkpoint": "export.bundle_from_checkpoint",
    "check_parity": "parity.check",
    "fold": "models.folding.fold",
    "load_checkpoint": "checkpoints.loading",
    "open_bundle": "bundle.artifacts",
    "open_runner": "runtimes.runners.open",
    "optimize_bundle": "optimize.run",
    "variant_from_bundle": "export.variants",
}
"""Name → the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FACE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
