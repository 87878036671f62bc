"""Read named tensors from a file without running any code in it.

This package reads PyTorch files as inert data: the pickles in a PyTorch file can build only tensors, plain values and
records of the names of everything else. Safetensors files contain no code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.checkpoints._other_files import EXPECTED, RESAVE_HINT, refuse_file, refuse_folder, unknown_name
from gmmvit_deploy.checkpoints._pickled import Name, OtherTensor, Record, TensorRef, kind_of
from gmmvit_deploy.checkpoints._torch_file import open_torch_file
from gmmvit_deploy.checkpoints._wrapping import (
    WRAPPER_KEYS,
    ChosenWeights,
    PlainNames,
    choose_weights,
    names_without_prefix,
    part_of,
    record_of,
    refuse_choice,
)
from gmmvit_deploy.errors import READABLE_HINT, CheckpointError
from gmmvit_deploy.files.kinds import WEIGHTS_SUFFIXES
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.models.sources.hints import WEIGHTS_KINDS, WeightsKind
from gmmvit_deploy.models.sources.record import TrainingRecord

if TYPE_CHECKING:
    from torch import Tensor

MODEL_METADATA_KEY = "gmmvit_model"
"""Key of the safetensors metadata entry with the model spec as JSON, in files whose tensors have the names of this
package's modules. Such a file has no other metadata entry, because safetensors writes several entries in varying order.
The checkpoints of ``gmmvit train`` have this entry and the following entries at their top level."""
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of the file of the weights in folders of timm, Hugging Face transformers and accelerate."""
INDEX_FILES = tuple(f"{name}.index.json" for name in WEIGHTS_FILES)
"""Names of the file that names the parts of the weights, in place of a file of `WEIGHTS_FILES`."""
_HUB_NAME = re.compile(r"(?:hf[-_]hub:|https?:/+(?:hf\.co|huggingface\.co)/)?([\w.-]+/([\w.-]+))")
IMAGES_METADATA_KEY = "gmmvit_images"
"""Key of the entry with the preprocessing and the class names as JSON, in checkpoints of ``gmmvit train``."""
WEIGHTS_METADATA_KEY = "gmmvit_weights"
"""Key of the entry that states which weights to export, ``trained`` or ``averaged``, in checkpoints of ``gmmvit train``
unless the user chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """The tensors of a checkpoint file by name, without prefixes such as ``module.``.

    wrapping: a description of the place of the tensors in the file.
    metadata: the text entries of a safetensors file, or those that ``gmmvit train`` writes into a PyTorch file.
    weights: ``trained`` or ``averaged``; None when the file does not state the kind of its weights.
    left_out: key of the state dict → the reason why the entry is no tensor of the model; these entries are not read.
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
        """True for the weights file of a bundle and a checkpoint of ``gmmvit train``: both state the spec."""
        return MODEL_METADATA_KEY in self.metadata

    def spec_json(self) -> Mapping[str, Any] | None:
        """Return the model spec in a file written by this package, or None.  Errors: CheckpointError when damaged."""
        return self._json(MODEL_METADATA_KEY, "model spec")

    def images_json(self) -> Mapping[str, Any] | None:
        """Return the preprocessing and the class names in a checkpoint of ``gmmvit train``, or None."""
        return self._json(IMAGES_METADATA_KEY, "preprocessing")

    def _json(self, key: str, what: str) -> Mapping[str, Any] | None:
        text = self.metadata.get(key)
        if text is None:
            return None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise CheckpointError(f"{self.path}: expected the {what} in the metadata to be JSON: {exc}") from exc
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.path}: expected the {what} in the metadata to be a JSON object")
        return data


def under_prefix(file: TensorFile, prefix: str) -> TensorFile:
    """Return the part of the tensors under a prefix, such as ``net.``, without the prefix."""
    reason = f"outside of '{prefix}', under which the network is"
    return replace(
        file,
        wrapping=f"{file.wrapping}, network under '{prefix}'",
        tensors={name.removeprefix(prefix): t for name, t in file.tensors.items() if name.startswith(prefix)},
        left_out={**file.left_out, **{name: reason for name in file.tensors if not name.startswith(prefix)}},
    )


def read_tensors(path: Path, weights: str | None = None, *, sha256: str = "", keep_prefix: bool = False) -> TensorFile:
    """Read a checkpoint file.

    Supports safetensors files and both formats of `torch.save`: a bare state dict, or a dict with a state dict under a
    key, such as those of `_wrapping.WRAPPER_KEYS`.
    weights: the weights to read (`_wrapping.choose_weights`); required if the file holds several sets.
    sha256: the hash of a safetensors file that the caller has compared with the file; without it, the file is hashed.
    keep_prefix: True for a part of the weights: whether all names have a prefix is only known of all parts together.
    Errors: CheckpointError when the file is absent, is damaged, is of an unsupported type or names a function or class
    that no state dict needs, or when ``weights`` is missing or contradicts the file.
    """
    if not path.is_file():
        require_checkpoint(path)
        raise CheckpointError(f"{path}: {EXPECTED}, but this path is a folder", hint=_weights_hint(path))
    try:
        with path.open("rb") as file:
            head = file.read(16)
        # The structure is read before the hash: to hash a damaged file of a terabyte, most of it a hole, takes long.
        if _looks_like_safetensors(head, path.stat().st_size):
            return _from_safetensors(path, weights, sha256, keep_prefix=keep_prefix)
        refuse_file(path, head)
        return _from_pytorch(path, weights, keep_prefix=keep_prefix)
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}", hint=READABLE_HINT) from exc


def weights_bytes(path: Path, weights: str | None = None) -> int:
    """Return the size of the weights of a file, folder or index as float32, from the shapes that the files state.

    weights: as in `read_tensors`.  Returns 0 for a file that `read_tensors` refuses.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        held = (path / name for name in (*WEIGHTS_FILES, *INDEX_FILES))
        return next((weights_bytes(file, weights) for file in held if file.is_file()), 0)
    try:
        if path.name.endswith(".index.json"):
            parts = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
            return sum(weights_bytes(path.parent / part, weights) for part in parts)
        with path.open("rb") as file:
            head = file.read(16)
        if _looks_like_safetensors(head, path.stat().st_size):
            with safe_open(path, framework="pt", device="cpu") as stored:
                shapes = [stored.get_slice(name).get_shape() for name in stored.keys()]  # noqa: SIM118 - not a dict
        else:
            with open_torch_file(path) as opened:
                own = _own_entries(record_of(path, opened.value))
                chosen = choose_weights(path, opened.value, weights or _kind_in(own))
                shapes = [ref.shape for ref in chosen.entries.values() if isinstance(ref, TensorRef)]
    except (OSError, ValueError, KeyError, TypeError, CheckpointError, SafetensorError):
        return 0
    return sum(4 * math.prod(shape) for shape in shapes)


def _from_safetensors(path: Path, weights: str | None, sha256: str, *, keep_prefix: bool) -> TensorFile:
    entries, metadata = _read_safetensors(path)
    own = MODEL_METADATA_KEY in metadata  # the tensors have the names of this package's modules
    if not own and (within := part_of(entries, weights)):
        entries = within
    else:
        refuse_choice(path, weights)
    if not entries:
        raise CheckpointError(f"{path}: the file holds no tensors", hint=RESAVE_HINT)
    keep = own or keep_prefix
    plain = PlainNames(names={name: name for name in entries}) if keep else names_without_prefix(entries)
    return TensorFile(
        path=path,
        sha256=sha256 or sha256_of_file(path),
        wrapping="safetensors" + _prefix_in_words(plain.prefix),
        tensors={short: entries[name] for name, short in plain.names.items()},
        metadata=metadata,
        left_out=plain.left_out,
    )


def _from_pytorch(path: Path, weights: str | None, *, keep_prefix: bool) -> TensorFile:
    with open_torch_file(path) as file:
        record = record_of(path, file.value)
        own = _own_entries(record)
        chosen = choose_weights(path, file.value, weights or _kind_in(own))
        refs = _only_tensors(path, chosen)
        keep = bool(own) or keep_prefix
        plain = PlainNames(names={name: name for name in refs}) if keep else names_without_prefix(refs)
        return TensorFile(
            path=path,
            sha256=sha256_of_file(path),
            wrapping=chosen.wrapping + _prefix_in_words(plain.prefix),
            tensors={short: file.tensor(name, refs[name]) for name, short in plain.names.items()},
            metadata=own,
            weights=chosen.kind,
            record=record,
            left_out=plain.left_out,
        )


def _own_entries(record: TrainingRecord) -> dict[str, str]:
    """Return the entries of a checkpoint of ``gmmvit train``."""
    keys = (MODEL_METADATA_KEY, IMAGES_METADATA_KEY, WEIGHTS_METADATA_KEY)
    own = {key: text for key in keys if isinstance(text := record.entries.get(key), str)}
    return own if MODEL_METADATA_KEY in own else {}


def _kind_in(own: Mapping[str, str]) -> WeightsKind | None:
    return next((kind for kind in WEIGHTS_KINDS if kind == own.get(WEIGHTS_METADATA_KEY)), None)


def _prefix_in_words(prefix: str) -> str:
    return f", keys with a '{prefix}' prefix" if prefix else ""


def require_checkpoint(path: Path) -> None:
    """Errors: CheckpointError when the path does not exist, or is a folder but no model folder.

    Imports no heavy package, so that a misspelt path is reported at once.
    """
    if (path / "manifest.json").is_file() and (path / "weights.safetensors").is_file():
        raise CheckpointError(
            f"{path}: {EXPECTED}, but this path is a bundle, the folder that gmmvit export writes",
            hint=f"give the weights of the bundle: {path / 'weights.safetensors'}; to draw the attention for an image, "
            f"type gmmvit inspect {path} --image FILE",
        )
    if path.is_dir() and not (path / "config.json").is_file():
        refuse_folder(path)
        raise CheckpointError(
            f"{path}: {EXPECTED}, but this path is a folder without the config.json of a model folder of timm",
            hint=f"{_weights_hint(path)}; if timm builds the model, also type --model and --model-args",
        )
    if not path.exists():
        hub = _HUB_NAME.fullmatch(str(path))
        if hub and path.suffix not in WEIGHTS_SUFFIXES and not path.parent.is_dir():
            hint = f"type hf download {hub[1]} --local-dir {hub[2]}, then gmmvit export {hub[2]} -o BUNDLE"
        elif str(path).startswith(("http:", "https:")):
            hint = "download the file yourself, and give the file"
        else:
            hint = "correct the path"
            if not path.suffix and path.name == str(path):
                hint += f"; for an architecture of timm, type gmmvit export WEIGHTS.pth --model {path} -o BUNDLE"
            raise CheckpointError(f"{path}: {EXPECTED}, but this path does not exist", hint=hint)
        raise CheckpointError(f"{path}: {EXPECTED} on this machine; gmmvit downloads nothing", hint=hint)


def _weights_hint(folder: Path) -> str:
    held = next((name for name in (*WEIGHTS_FILES, *INDEX_FILES) if (folder / name).is_file()), None)
    return "give the file of the weights" + (f", {folder / held}" if held else "")


def states_model(path: Path) -> bool:
    """Return whether the head of a file holds the spec of its model, as that of the weights of a bundle does."""
    try:
        with path.open("rb") as file:
            return MODEL_METADATA_KEY.encode() in file.read(1 << 16)
    except OSError:  # `require_checkpoint` and `read_tensors` say why
        return False


def _looks_like_safetensors(head: bytes, size_bytes: int) -> bool:
    header_bytes = int.from_bytes(head[:8], "little")
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= header_bytes <= max(size_bytes, 1 << 20)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            metadata = dict(file.metadata() or {})
            return with_shared(tensors, metadata), metadata
    except SafetensorError as exc:
        raise CheckpointError(
            f"{path}: damaged safetensors file: {exc}", hint="copy or download the file again"
        ) from exc


def with_shared(tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors, and under their other names those that were shared by several names and stored once.

    metadata: of a safetensors file or of its index, where the writer states: other name → the name that is stored.
    """
    shared = {name: held for name, held in metadata.items() if isinstance(held, str) and held in tensors}
    return {**{name: tensors[held] for name, held in shared.items()}, **tensors}


def _only_tensors(path: Path, chosen: ChosenWeights) -> dict[str, TensorRef | OtherTensor]:
    """Errors: CheckpointError when the state dict is empty, or when an entry is no tensor or has no name."""
    entries = chosen.entries
    if isinstance(entries, Record) and not entries:
        raise unknown_name(path, entries.name, key=chosen.key, root=True)
    unknown = [value for value in entries.values() if isinstance(value, Name | Record)]
    if unknown and len(unknown) == len(entries) == 1 and chosen.key is None:  # such as {"net": a whole network}
        raise unknown_name(path, kind_of(unknown[0]), key=str(next(iter(entries))), root=True)
    if unknown:
        raise unknown_name(path, kind_of(unknown[0]), key=chosen.key)
    if not entries:
        raise CheckpointError(f"{path}: the file holds no tensors", hint=RESAVE_HINT)
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
