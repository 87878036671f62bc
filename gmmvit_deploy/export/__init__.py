"""A trained model to a bundle: ONNX graph, other precisions, and the proof that they give PyTorch's logits.

The face: `bundle_from_checkpoint`, `from_module`, `options`, `variants` (precisions), `onnx_from_model`, `golden`
(reference outputs). The package itself can be called, as `from_module.bundle_from_module`:

    gmmvit_deploy.export(module, "bundle", example=images, mean=(0.5,) * 3, std=(0.5,) * 3, labels=["cat", "dog"])
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Export(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from gmmvit_deploy.export.from_module import bundle_from_module

        return bundle_from_module(*args, **options)


# An import of any module of this package sets gmmvit_deploy.export to the package, so a function cannot have this name.
sys.modules[__name__].__class__ = _Export
