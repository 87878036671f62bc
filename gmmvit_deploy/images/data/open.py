"""Open the data that the options ``--data`` and ``--calibration`` name.

    cifar10:PATH   cifar100:PATH   svhn:PATH   mnist:PATH   tiny-imagenet:PATH
    folder:PATH    a folder with a subfolder per class, or a folder of images
    table:PATH     a .csv file with a column of files and a column of 0 and 1 for each label (multi-label)
    array:PATH     an .npz or .npy file of images
    PATH           a folder or an array file, as with folder: and array:
    digits         the images of digits that are part of scikit-learn

The suffix ``#train`` or ``#test`` selects the split; without a suffix the split is ``test``.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data import formats
from gmmvit_deploy.images.data.files import KINDS, SPLITS, split_folder
from gmmvit_deploy.images.data.images import Images

_WITHOUT_PATH = "digits"
_READERS: dict[str, Callable[[Path, str], Images]] = {
    "cifar10": partial(formats.cifar, classes=10),
    "cifar100": partial(formats.cifar, classes=100),
    "svhn": formats.svhn,
    "mnist": formats.idx,
    "tiny-imagenet": formats.tiny_imagenet,
    "folder": formats.class_folders,
    "table": lambda path, split: formats.table(path),
    "array": lambda path, split: formats.array_file(path),
    "digits": lambda path, split: formats.digits(split),
}


def is_named(text: str) -> bool:
    """Return True if the text begins with a kind of data, and False if the text is only a path."""
    return text.partition("#")[0].partition(":")[0] in KINDS


def open_data(text: str, *, split: str = "test") -> Images:
    """Open the data of a text ``kind:path#split``.  split: if the text names none.  Errors: InputError."""
    require_data(text)
    kind, path, named = _parts(text)
    return _READERS[kind](path, named or split)


def kind_of_data(text: str) -> str:
    """Return the kind of data that a text names.  Errors: InputError when the text is not valid."""
    return _parts(text)[0]


def held_out_of(text: str) -> str | None:
    """Return the text that names the split test of the same data, or None if there is none.  Errors: InputError."""
    kind, path, split = _parts(text)
    single = kind == "array" or (kind == "svhn" and path.is_file())
    if split == "test" or single or (kind == "folder" and split_folder(path, "test") == path):
        return None
    return f"{text.partition('#')[0]}#test"


def require_data(text: str) -> None:
    """Check a text ``kind:path#split``, and that the path exists, without reading the data.  Errors: InputError."""
    kind, path, _ = _parts(text)
    if kind != _WITHOUT_PATH and not path.exists():
        beside = sorted(one.name for one in path.parent.iterdir()) if path.parent.is_dir() else []
        alike = get_close_matches(path.name, beside, n=1)
        hint = f"did you mean {path.with_name(alike[0])}?" if alike else f"type {kind}:PATH with the path of the data"
        raise InputError(f"{path}: no such file or folder", hint=hint)


def _parts(text: str) -> tuple[str, Path, str]:
    described, _, split = text.partition("#")
    kind, _, path = described.partition(":")
    if kind not in _READERS:
        kind, path = _kind_of_path(text, Path(described)), described
    if split not in (*SPLITS, ""):
        raise InputError(
            f"data {text!r}: split {split!r} is not known", hint=f"type #{' or #'.join(SPLITS)} after the path"
        )
    if (kind == _WITHOUT_PATH) == bool(path):
        problem = f"{kind} takes no path" if path else f"expected a path after {kind}:"
        raise InputError(f"data {text!r}: {problem}", hint=f"type {kind}" if path else f"type {kind}:PATH")
    return kind, Path(path), split


def _kind_of_path(text: str, path: Path) -> str:
    if path.is_dir():
        return "folder"
    if path.suffix.lower() in (".npz", ".npy"):
        return "array"
    missing = "" if ":" in text or path.exists() else f"; {path} does not exist"
    raise InputError(
        f"data {text!r}: expected a kind of data such as digits or cifar10:PATH, a folder, an .npz or an .npy{missing}",
        hint=f"type {KINDS[-1]}, or KIND:PATH, where KIND is one of {', '.join(KINDS[:-1])}",
    )
