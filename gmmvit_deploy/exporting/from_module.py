"""Export a network that is in memory.  Its weights are saved, and take the way of a checkpoint of the user's own class.

The class must be one that Python imports from a file: the bundle records the file, as for ``--model FILE.py:CLASS``.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.exporting.options import ExportOptions
from gmmvit_deploy.files.writing import require_free
from gmmvit_deploy.images.resize_rules import ResizeRule
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.progress import OnProgress, ignore

_ARGUMENTS = "give model_args with all arguments that the module was built with, such as model_args={'depth': 6}"

_SIZE = "give normalised images of the size and the channels of training"


def export(
    module: nn.Module,
    out: Path | str,
    *,
    example: Tensor,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    labels: Sequence[str] | None = None,
    resize: ResizeRule | None = None,
    model_args: Mapping[str, Any] | None = None,
    precisions: str | Sequence[Precision] = (),
    force: bool = False,
    on_progress: OnProgress = ignore,
    **options: Any,
) -> Bundle:
    """Export a trained network in memory to a bundle in the folder ``out``, and prove that the graph gives its logits.

    Example: ``gmmvit_deploy.export(net, "bundle", example=images, mean=mean, std=std, labels=["cat", "dog"])``.

    module: takes a float32 batch of normalised images and returns the logits; it is not changed. Its class must be in a
    Python file that can be imported, because other processes build the network again.
    example: a batch of images, float32 (B, channels, size, size), normalised as in training.
    mean, std, labels, resize: as in `ExportOptions`. A class of one's own without ``resize`` takes
    ``stretch-bilinear``, which does not keep the aspect ratio; a network of timm needs ``resize``.
    model_args: the arguments that the class was built with, as JSON values by name; None for a class without arguments.
    precisions: other precisions whose graphs the bundle also gets, such as ``"fp16,bf16"``.
    options: other fields of `ExportOptions`, such as ``crop_pct=0.9`` or ``max_batch=8``.
    Errors: InputError when the class cannot be imported, or the class with ``model_args`` and the weights of ``module``
    does not give its logits.  The errors of `bundle_from_checkpoint`.
    """
    require_free(Path(out), force=force)
    channels, size = _image(example)
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    if type(module).__module__.startswith("timm."):
        model = _name_in_timm(module)
    else:
        model, resize = _importable(type(module)), resize or "stretch-bilinear"
    hints = LoadHints(model=model, model_args=model_args or {}, image_size=size, channels=channels)
    export_options = ExportOptions(mean=mean, std=std, labels=labels, resize=resize, **options)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / f"{type(module).__name__}.pth"
        torch.save({key: _as_stored(tensor) for key, tensor in module.state_dict().items()}, weights)
        try:
            built = load_checkpoint(weights, hints).model
        except InputError as exc:
            hint = _ARGUMENTS if "--model-args" in exc.hint else _SIZE if "--image-size" in exc.hint else exc.hint
            message = str(exc).removeprefix(f"{weights}: ").replace("--image-size", "the size of example")
            raise InputError(f"module: {message}", hint=hint) from exc
        _require_same_logits(_logits(built, example), _logits(module, example), model)
        del built
        return bundle_from_checkpoint(
            weights, out, export_options, hints=hints, precisions=precisions, force=force, on_progress=on_progress
        )


def _as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU; half precision becomes float32, in which the class is built."""
    stored = tensor.detach().cpu()
    return stored.float() if stored.dtype in (torch.float16, torch.bfloat16) else stored


def _image(example: Any) -> tuple[int, int]:
    """Return (channels, side in pixels) of a batch of images, or InputError."""
    shape = tuple(getattr(example, "shape", ()))
    if not isinstance(example, Tensor) or example.dtype != torch.float32 or len(shape) != 4 or shape[2] != shape[3]:
        actual = f"{example.dtype} {shape}" if isinstance(example, Tensor) else f"a {type(example).__name__} {shape}"
        raise InputError(
            f"example: expected a batch of square images, torch.float32 (B, channels, size, size), got {actual}",
            hint="give a batch of your data loader, or for example torch.randn(2, 3, 224, 224)",
        )
    return shape[1], shape[2]


def _name_in_timm(module: Any) -> str:
    """Return the name by which timm builds the network again, or InputError."""
    name = getattr(module, "pretrained_cfg", {}).get("architecture")
    if not name:
        raise InputError(
            f"module: {type(module).__name__} of timm was built as a class, without a name of timm's list",
            hint='build it with timm.create_model("NAME", …), load the weights with '
            "load_state_dict(module.state_dict()), and export it",
        )
    return str(name)


def _importable(own_class: type) -> str:
    """Return ``FILE.py:CLASS`` of a class that another process can import, or InputError."""
    name, origin = own_class.__qualname__, own_class.__module__
    where, path = "", getattr(sys.modules.get(origin), "__file__", None) or ""
    if any(base.__module__.startswith("transformers.modeling") for base in own_class.__mro__):
        raise InputError(
            f"module: {name} is a network of Hugging Face, which states its own configuration",
            hint='type module.save_pretrained("folder"), then bundle_from_checkpoint("folder", …)',
        )
    if origin == "__main__":
        where = "in this notebook or script, which no other process can import"
    elif "<locals>" in name or "." in name:
        where = "inside a function or another class, where no other process can find it"
    elif not path.endswith(".py"):
        where = f"in {origin}, which is no Python file"
    if where:
        short = name.rpartition(".")[2]
        raise InputError(
            f"module: the class {name} is defined {where}",
            hint=f"write the class into a file such as net.py, at its top level; type from net import {short}, build "
            "the network with this class, load the weights with load_state_dict(module.state_dict()), and export it",
        )
    return f"{path}:{name}"


def _require_same_logits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Errors: InputError when the network built again gives other logits for the example, in float64, than the module.

    The shapes of the tensors do not show every argument, and the file can have changed since it was imported.
    """
    if not torch.allclose(actual, expected, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise InputError(
            f"module: {what}, built again with the weights of the module, gives other logits, which differ by up to "
            f"{float((actual - expected).abs().max()):.3g}",
            hint=f"{_ARGUMENTS}; if the file has changed since it was imported, start Python again",
        )


@torch.no_grad()
def _logits(module: nn.Module, example: Tensor) -> Any:
    """Return what the module computes in float64.  Errors: InputError when it does not take the example."""
    try:
        return copy.deepcopy(module).cpu().double().eval()(example.detach().cpu().double())
    except (AssertionError, RuntimeError) as exc:
        shape = tuple(example.shape)
        raise InputError(f"example: the network does not take images of shape {shape}: {exc}", hint=_SIZE) from exc
