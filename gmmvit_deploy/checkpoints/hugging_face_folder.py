"""Read the weights of a folder that transformers' ``save_pretrained`` writes.

model.safetensors or pytorch_model.bin                          the weights
model.safetensors.index.json or pytorch_model.bin.index.json    the names of several files with parts of the weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.checkpoints.json_files import json_object
from gmmvit_deploy.checkpoints.reading import TensorFile, read_tensors
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.models.families.hugging_face.names import names_in_network
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INDEX_FILES", "read_parts", "with_network_names"]

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HINT = "copy or download the folder again, with all parts of the weights"


def read_parts(index: Path, weights: str | None = None) -> TensorFile:
    """Read the weights whose parts an index names.

    index: a file of `INDEX_FILES`.
    The SHA-256 of the result is that of a text with a line ``SHA-256  name`` for each part, in the order of the names.
    Errors: CheckpointError as in `read_tensors`; when the index is not valid, names a file outside of the folder, or
    contradicts the parts.
    """
    placed = json_object(index, hint=_HINT).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(part, str) for part in placed.values()):
        raise CheckpointError(f"{index}: expected an object under 'weight_map': tensor → file", hint=_HINT)
    tensors: dict[str, Tensor] = {}
    hashes: list[str] = []
    left_out: dict[str, str] = {}
    for name in sorted({*placed.values()}):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: names the part {name!r}; expected a file in the same folder", hint=_HINT)
        part = read_tensors(index.parent / name, weights)
        own = {tensor for tensor, file in placed.items() if file == name}
        if differing := sorted(own ^ (part.tensors.keys() | part.left_out.keys())):
            raise CheckpointError(
                f"{index.parent / name}: the index {index.name} and this part differ in the tensor {differing[0]}",
                hint=_HINT,
            )
        tensors |= part.tensors
        left_out |= part.left_out
        hashes.append(f"{part.sha256}  {name}\n")
    return TensorFile(
        path=index.parent,
        sha256=sha256_of_bytes("".join(hashes).encode()),
        wrapping=f"{len(hashes)} parts, {part.wrapping}",
        tensors=tensors,
        metadata={},
        weights=part.weights,
        left_out=left_out,
    )


def with_network_names(file: TensorFile, spec: HuggingFaceSpec) -> TensorFile:
    """Return the file with the names of the tensors in the network, without the tensors that are known to be unused.

    A name that transformers does not know stays as it is.
    Errors: CheckpointError when two tensors have the same name in the network.
    """
    names = names_in_network(spec, file.tensors)
    tensors: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for old, new in names.items():
        if new is None:
            continue
        if new in tensors:
            raise CheckpointError(
                f"{file.path}: the tensors {origins[new]} and {old} are the same tensor {new} of the network",
                hint="save the model again with save_pretrained",
            )
        tensors[new], origins[new] = file.tensors[old], old
    reason = "transformers computes this tensor, or does not read it"
    unused: Mapping[str, str] = {old: reason for old, new in names.items() if new is None}
    return replace(file, tensors=tensors, left_out={**file.left_out, **unused})
