"""Read named tensors from a file without running any code in it.

PyTorch files are read as inert data: their pickles can build tensors, plain containers and the values of an
``argparse.Namespace``, and nothing else. Safetensors files contain no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.checkpoints.inert import OtherTensor, TensorRef, kind_of
from gmmvit_deploy.checkpoints.torch_file import EXPECTED, open_torch_file
from gmmvit_deploy.checkpoints.wrapping import (
    WRAPPER_KEYS,
    PlainNames,
    choose_weights,
    names_without_prefix,
    record_of,
    refuse_choice,
)
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.sources.hints import WeightsKind
from gmmvit_deploy.sources.record import TrainingRecord
from gmmvit_deploy.writing import sha256_of_file

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MODEL_METADATA_KEY", "SPEC_METADATA_KEY", "TensorFile", "read_tensors", "require_checkpoint"]

SPEC_METADATA_KEY = "gmmvit_spec"
"""Safetensors metadata entry with the model spec as JSON, in files whose tensors have the released code's names: the
weights of bundles up to format gmmvit-bundle/2."""
MODEL_METADATA_KEY = "gmmvit_model"
"""Safetensors metadata entry with the model spec as JSON, in files whose tensors are named after the modules of this
package.  Such files have no other entry, because safetensors writes several entries in an order that varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """The tensors of a checkpoint file by name, without prefixes such as ``module.``.

    wrapping: how the file packs the tensors, in words.  metadata: the text entries of a safetensors file.
    weights: whether the tensors are trained or averaged; None when nothing in the file states which.
    record: plain values that the training script stored beside the tensors.
    left_out: key of the state dict → reason why it is no tensor of the model; these tensors are not read.
    """

    path: Path
    sha256: str
    wrapping: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    weights: WeightsKind | None = None
    record: TrainingRecord = field(default_factory=TrainingRecord)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_own_names(self) -> bool:
        """True if the tensors are named after the modules of this package, as in the weights file of a bundle."""
        return MODEL_METADATA_KEY in self.metadata

    def spec_json(self) -> Mapping[str, Any] | None:
        """Return the model spec in the metadata of a file written by this package, or None.

        Errors: CheckpointError when the entry is not a JSON object.
        """
        text = self.metadata.get(MODEL_METADATA_KEY, self.metadata.get(SPEC_METADATA_KEY))
        if text is None:
            return None
        try:
            data = json.loads(text)
        except ValueError as exc:
            raise CheckpointError(f"{self.path}: expected the model spec in the metadata to be JSON: {exc}") from exc
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.path}: expected the model spec in the metadata to be a JSON object")
        return data


def read_tensors(path: Path, weights: WeightsKind | None = None) -> TensorFile:
    """Read a checkpoint file.

    Supports safetensors and both formats of `torch.save`: a bare state dict, or a dict with a state dict under one of
    `wrapping.WRAPPER_KEYS`. Only the tensors of that state dict are read, not the state of an optimiser.
    weights: required when the file holds trained and averaged weights.
    Errors: CheckpointError when the file is absent, damaged, of an unsupported type, would run code, or when
    ``weights`` is missing or contradicts the file.
    """
    require_checkpoint(path)
    try:
        digest = sha256_of_file(path)
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}") from exc
    if _looks_like_safetensors(head, path.stat().st_size):
        return _from_safetensors(path, digest, weights)
    return _from_pytorch(path, digest, weights)


def _from_safetensors(path: Path, digest: str, weights: WeightsKind | None) -> TensorFile:
    refuse_choice(path, weights)
    entries, metadata = _read_safetensors(path)
    if not entries:
        raise CheckpointError(f"{path}: the file holds no tensors")
    own = MODEL_METADATA_KEY in metadata  # these names are the modules of this package
    plain = PlainNames(names={name: name for name in entries}) if own else names_without_prefix(entries)
    return TensorFile(
        path=path,
        sha256=digest,
        wrapping="safetensors" + _prefix_in_words(plain.prefix),
        tensors={short: entries[name] for name, short in plain.names.items()},
        metadata=metadata,
        left_out=plain.left_out,
    )


def _from_pytorch(path: Path, digest: str, weights: WeightsKind | None) -> TensorFile:
    with open_torch_file(path) as file:
        record = record_of(path, file.value, file.namespaces)
        chosen = choose_weights(path, file.value, weights)
        refs = _only_tensors(path, chosen.entries)
        plain = names_without_prefix(refs)
        return TensorFile(
            path=path,
            sha256=digest,
            wrapping=chosen.wrapping + _prefix_in_words(plain.prefix),
            tensors={short: file.tensor(name, refs[name]) for name, short in plain.names.items()},
            metadata={},
            weights=chosen.kind,
            record=record,
            left_out=plain.left_out,
        )


def _prefix_in_words(prefix: str) -> str:
    return f", keys with a '{prefix}' prefix" if prefix else ""


def require_checkpoint(path: Path) -> None:
    """Check that the file exists.  Errors: CheckpointError when the path does not exist or is a folder.

    This check imports no heavy package, so that a misspelt path is reported at once.
    """
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path}: {EXPECTED}, but this path {problem}")


def _looks_like_safetensors(head: bytes, size_bytes: int) -> bool:
    header_bytes = int.from_bytes(head[:8], "little")
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= header_bytes <= max(size_bytes, 1 << 20)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, dict(file.metadata() or {})
    except SafetensorError as exc:
        raise CheckpointError(
            f"{path}: damaged safetensors file: {exc}", hint="copy or download the file again"
        ) from exc


def _only_tensors(path: Path, entries: Mapping[Any, Any]) -> dict[str, TensorRef | OtherTensor]:
    """Check that a state dict maps names to tensors.  Errors: CheckpointError."""
    if not entries:
        raise CheckpointError(f"{path}: the file holds no tensors")
    others = [
        f"{name!r} ({kind_of(value)})"
        for name, value in entries.items()
        if not (isinstance(name, str) and isinstance(value, TensorRef | OtherTensor))
    ]
    if others:
        raise CheckpointError(
            f"{path}: expected a state dict, which maps names to tensors; these entries are no tensors: "
            f"{', '.join(others[:5])}",
            hint="save the state dict with torch.save, as the whole file or under the key "
            f"{', '.join(WRAPPER_KEYS[:-1])} or {WRAPPER_KEYS[-1]}",
        )
    return dict(entries)
