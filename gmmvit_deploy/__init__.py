"""Take a trained vision transformer to production: network or checkpoint → bundle → fastest program → server.

    export(net, "bundle", example=images, mean=mean, std=std, labels=labels)   a torch.nn.Module in memory → bundle
    bundle_from_checkpoint("checkpoint.pth", "bundle", ExportOptions(mean=mean, std=std))
    optimize_bundle("bundle", OptimizeOptions(data="folder:val"))               the fastest program that passes
    classify_files(BundleClassifier("bundle"), ["photo.jpg"])                   labels with probabilities
    open_runner("openvino:bf16", "bundle").run(images)                          uint8 pixels → logits
    check_parity("bundle", [open_runner("openvino", "bundle")])                 every check against PyTorch

A bundle is the folder that the export writes, and that the commands of gmmvit read: ``gmmvit serve bundle``.
The names of `__all__` are imported on first use, so importing the package imports no heavy dependency. Type checkers
read them in ``__init__.pyi``.
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
    "BundleClassifier": "runtimes.runners.classify",
    "ExportOptions": "exporting.options",
    "LoadHints": "models.sources.hints",
    "OptimizeOptions": "optimize.run",
    "ParityOptions": "parity.options",
    "bundle_from_checkpoint": "exporting.bundle_from_checkpoint",
    "check_parity": "parity.check",
    "classify_files": "runtimes.runners.classify",
    "classify_source": "bulk.run",
    "export": "exporting.from_module",
    "fold": "models.folding.fold",
    "load_checkpoint": "checkpoints.loading",
    "open_bundle": "bundle.artifacts",
    "open_runner": "runtimes.runners.open",
    "optimize_bundle": "optimize.run",
    "variant_from_bundle": "exporting.variants",
}
"""Name → the module that has it."""
__all__ = [*_FACE]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FACE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
