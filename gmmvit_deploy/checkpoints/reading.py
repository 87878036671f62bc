"""Read named tensors from a file without running any code in it.

PyTorch files are read with PyTorch's weights-only unpickler, which builds only tensors and plain containers and refuses
every other call. Safetensors files contain no code.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import CheckpointError
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

_WRAPPER_KEYS = ("model_state_dict", "state_dict", "model")
_ZIP_MAGIC = b"PK\x03\x04"  # torch.save writes zip files since 1.6
_DATA_PARALLEL_PREFIX = "module."
_EXPECTED = "expected a PyTorch checkpoint (.pth) or a safetensors file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """The tensors of a checkpoint file by name, without the ``module.`` prefix.

    wrapping: how the file packs the tensors, in words.  metadata: the text entries of a safetensors file.
    """

    path: Path
    sha256: str
    wrapping: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

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


def read_tensors(path: Path) -> TensorFile:
    """Read a checkpoint file.

    Supported are safetensors files and the PyTorch files of the released training code: a dict with
    ``model_state_dict``, or a bare state dict. The keys may have the prefix ``module.``.
    Errors: CheckpointError when the file is absent, damaged, of an unsupported type, or would run code.
    """
    require_checkpoint(path)
    try:
        digest = sha256_of_file(path)
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}") from exc
    metadata: dict[str, str] = {}
    if _looks_like_safetensors(head, path.stat().st_size):
        entries, metadata = _read_safetensors(path)
        wrapping = "safetensors"
    else:
        entries, wrapping = _unwrap(path, _read_pytorch(path, head))
    tensors, prefixed = _without_prefix(_only_tensors(path, entries))
    if prefixed:
        wrapping += ", keys with a 'module.' prefix"
    return TensorFile(path=path, sha256=digest, wrapping=wrapping, tensors=tensors, metadata=metadata)


def require_checkpoint(path: Path) -> None:
    """Check that the file exists.  Errors: CheckpointError when the path does not exist or is a folder.

    This check imports no heavy package, so that a misspelt path is reported at once.
    """
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path}: {_EXPECTED}, but this path {problem}")


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


def _read_pytorch(path: Path, head: bytes) -> object:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the conditions that torch warns about raise CheckpointError below
            return torch.load(path, map_location="cpu", weights_only=True)
    # A damaged or hostile pickle can raise any exception inside the unpickler.
    except Exception as exc:
        text = str(exc)
        forbidden = re.search(r"GLOBAL ([\w.]+)", text)
        if forbidden:
            raise CheckpointError(
                f"{path}: the file was not loaded, because the pickle in the file calls {forbidden.group(1)}, "
                "which creates no tensor; no code of the file was run",
                hint="on the machine that made the file, run torch.save({'model_state_dict': "
                "model.state_dict()}, 'weights.pth'), and use weights.pth",
            ) from exc
        if "TorchScript" in text:
            raise CheckpointError(
                f"{path}: {_EXPECTED}, got a TorchScript archive, which is code",
                hint="save model.state_dict() with torch.save instead",
            ) from exc
        if head.startswith(_ZIP_MAGIC) or "unexpected EOF" in text:
            raise CheckpointError(
                f"{path}: the file is truncated or damaged ({path.stat().st_size} bytes)",
                hint="copy or download the file again",
            ) from exc
        raise CheckpointError(
            f"{path}: {_EXPECTED}, got a file that torch.load cannot read ({type(exc).__name__})",
            hint="give the path of a file that torch.save or safetensors wrote",
        ) from exc


def _unwrap(path: Path, loaded: object) -> tuple[dict[str, Any], str]:
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected a dict of tensors, got {type(loaded).__name__}")
    for key in _WRAPPER_KEYS:
        if isinstance(loaded.get(key), dict):
            return loaded[key], f"training checkpoint, weights under '{key}'"
    return loaded, "bare state dict"


def _only_tensors(path: Path, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    import torch

    if not entries:
        raise CheckpointError(f"{path}: the file holds no tensors")
    others = [
        f"{name!r} ({type(value).__name__})"
        for name, value in entries.items()
        if not (isinstance(name, str) and isinstance(value, torch.Tensor))
    ]
    if others:
        raise CheckpointError(
            f"{path}: expected a state dict, which maps names to tensors; these entries are no tensors: "
            f"{', '.join(others[:5])}",
            hint="save the state dict with torch.save, as the whole file or under the key "
            f"{', '.join(_WRAPPER_KEYS[:-1])} or {_WRAPPER_KEYS[-1]}",
        )
    for name, tensor in entries.items():
        # Copying a view that repeats a small storage would exhaust the memory.
        dense = tensor.layout == torch.strided and not tensor.is_quantized
        if not dense or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise CheckpointError(f"{path}: expected {name} to be a dense tensor, not sparse, quantised or expanded")
    return dict(entries)


def _without_prefix(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    if not all(name.startswith(_DATA_PARALLEL_PREFIX) for name in tensors):
        return tensors, False
    return {name.removeprefix(_DATA_PARALLEL_PREFIX): tensor for name, tensor in tensors.items()}, True
