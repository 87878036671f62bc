"""Write and read ``weights.safetensors``, the file of a bundle with the tensors of the trained model.

metadata   the model spec as JSON, from which the model is rebuilt
tensors    the model's state dict: every parameter, and every buffer that PyTorch saves, as trained
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gmmvit_deploy.bundle.artifacts import Manifest
from gmmvit_deploy.checkpoints._wrapping import of_training
from gmmvit_deploy.checkpoints.reading import MODEL_METADATA_KEY, TensorFile, read_tensors
from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.models.families import model_from_spec, spec_from_json
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.shapes_only import shapes_only
from gmmvit_deploy.models.sources.source import Conversion, TensorOrigins, origin_keys
from gmmvit_deploy.models.specs import ModelSpec, spec_to_json

if TYPE_CHECKING:
    from torch import Tensor

_MAX_LISTED = 12


def bytes_from_model(model: Model) -> bytes:
    """Return the content of ``weights.safetensors`` for a model.  Tensors that share memory are stored separately."""
    from safetensors.torch import save

    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in model.state_dict().items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.detach().clone() if storage in storages else tensor.detach().contiguous()
        storages.add(storage)
    return save(separate, metadata={MODEL_METADATA_KEY: json.dumps(spec_to_json(model.spec))})


def model_from_bundle(manifest: Manifest, weights: Path) -> Model:
    """Return the model of a bundle, in evaluation mode, float32, on the CPU.

    manifest: of the opened bundle that holds ``weights``: opening the bundle has compared the file with its hash.
    Errors:
        CheckpointError: the file cannot be read.
        BundleError: the file does not fit the manifest's spec.
    """
    file = read_tensors(weights, sha256=manifest.files.get(weights.name, ""))  # compared when the bundle was opened
    written = file.spec_json()
    reasons = []
    # Two models with different numbers of heads or forms of the mask can have tensors of the same names and shapes.
    if written is not None and spec_from_json(written) != manifest.spec:
        reasons.append(f"the weights belong to {spec_from_json(written)}, but the manifest describes {manifest.spec}")
    if problems := misfits(manifest.spec, file.tensors):
        reasons.append(
            f"{len(problems)} tensors do not fit the {manifest.spec.family} model that the manifest describes:"
            f"{listed(problems)}"
        )
    if reasons:
        raise BundleError(f"{weights}: {'; '.join(reasons)}", hint="write the bundle again with gmmvit export")
    model = filled_model(manifest.spec, file.tensors)
    model.outputs, model.normalises = manifest.output_names, manifest.unit_length
    return model


def tensors_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the state dict of a model of the spec, without values."""
    with shapes_only():
        return model_from_spec(spec).state_dict()


def misfits(spec: ModelSpec, tensors: Mapping[str, Tensor], origins: TensorOrigins | None = None) -> list[str]:
    """Return a line for every tensor that is missing, unknown to the model, or of an unexpected shape or data type.

    origins: by default the key in the file is the name in the model.
    """
    state = tensors_of(spec)
    origins = origins or {name: name for name in state}
    used = dict.fromkeys(key for origin in origins.values() for key in origin_keys(origin))
    problems = [f"no key of the file is assigned to the model's tensor {name}" for name in state if name not in origins]
    problems += [f"the model has no tensor {name}" for name in origins if name not in state]
    problems += [f"the file has no tensor {key}" for key in used if key not in tensors]
    problems += [f"unknown key {key} {tuple(tensor.shape)}" for key, tensor in tensors.items() if key not in used]
    for name, origin in origins.items():
        if name in state and all(key in tensors for key in origin_keys(origin)):
            problems += _misfit(origin, tensors, state[name])
    return problems


def _misfit(origin: str | Conversion, tensors: Mapping[str, Tensor], expected: Tensor) -> Iterator[str]:
    keys = ", ".join(origin_keys(origin))
    try:
        tensor = tensor_from_file(origin, tensors)
    # The conversion runs before the shapes of the file's tensors are checked, so an unexpected shape can raise.
    except (RuntimeError, ValueError, IndexError) as exc:
        shapes = ", ".join(str(tuple(tensors[key].shape)) for key in origin_keys(origin))
        yield f"cannot convert {keys} of shape {shapes} to a tensor of the model: {exc}"
        return
    of = "has shape" if isinstance(origin, str) else "is converted to shape"
    if tensor.shape != expected.shape:
        yield f"{keys} {of} {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
    # Such a tensor becomes float32 where it is copied into the model; `loading` says so.
    elif tensor.dtype != expected.dtype and not (_becomes_float32(tensor) and str(expected.dtype) == "torch.float32"):
        yield f"{keys} is {tensor.dtype}, expected {expected.dtype}"


def tensor_from_file(origin: str | Conversion, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of the model that ``origin`` describes.  tensors: those of the file."""
    if isinstance(origin, str):
        return tensors[origin]
    return origin.convert(*(tensors[key] for key in origin.keys))


def _becomes_float32(tensor: Tensor) -> bool:
    return str(tensor.dtype) in ("torch.bfloat16", "torch.float16", "torch.float64")


def filled_model(spec: ModelSpec, state: Mapping[str, Tensor]) -> Model:
    """Build a model of the spec and copy the tensors of ``state``, a whole state dict, into it."""
    model = model_from_spec(spec)
    # The values are copied: tensors of a file can share memory, and a change in one layer must not change another one.
    model.load_state_dict(state, strict=True)
    return model.eval().requires_grad_(True)


def without_training(file: TensorFile, used: Iterable[str]) -> TensorFile:
    """Return the file without the tensors of losses and metrics.  used: the names that the network reads."""
    parts = {name.partition(".")[0] for name in used}
    left_out = {name for name in file.tensors if of_training(name) and name.partition(".")[0] not in parts}
    reason = "belongs to the loss or a metric of training, by its name"
    return replace(
        file,
        tensors={name: tensor for name, tensor in file.tensors.items() if name not in left_out},
        left_out={**file.left_out, **dict.fromkeys(left_out, reason)},
    )


def listed(lines: list[str]) -> str:
    """Return the first 12 lines, each indented on a new line, and the number of the others."""
    more = len(lines) - _MAX_LISTED
    shown = lines[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return "".join(f"\n  {line}" for line in shown)


def as_float32(file: TensorFile, *, keep: set[str]) -> TensorFile:
    """Return the file with floating-point tensors as float32, but those of the types ``keep``, and words about it."""
    changed = {name: t for name, t in file.tensors.items() if _becomes_float32(t) and str(t.dtype) not in keep}
    if not changed:
        return file
    types = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in changed.values()}))
    tensors = {**file.tensors, **{name: tensor.float() for name, tensor in changed.items()}}
    return replace(file, wrapping=f"{file.wrapping}, {types} as float32", tensors=tensors)
