"""``--data`` and ``--calibration``: what their text means.

    cifar10:PATH   cifar100:PATH   svhn:PATH   mnist:PATH   tiny-imagenet:PATH
    folder:PATH    class folders, or a folder of images
    array:PATH     an .npz or .npy of images
    digits         scikit-learn's, which come with it

``#train`` or ``#test`` behind it names the split; ``test`` is taken otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gmmvit_deploy.data import formats
from gmmvit_deploy.data.images import Images
from gmmvit_deploy.errors import InputError

__all__ = ["KINDS", "is_named", "open_data"]

SPLITS = ("test", "train")
_READERS: dict[str, Callable[[Path, str], Images]] = {
    "cifar10": partial(formats.cifar, classes=10),
    "cifar100": partial(formats.cifar, classes=100),
    "svhn": formats.svhn,
    "mnist": formats.idx,
    "tiny-imagenet": formats.tiny_imagenet,
    "folder": formats.class_folders,
    "array": lambda path, split: formats.array_file(path),
    "digits": lambda path, split: formats.digits(split),
}
KINDS = tuple(_READERS)


def is_named(text: str) -> bool:
    """Whether the text names a kind of data, rather than a path alone."""
    return text.partition("#")[0].partition(":")[0] in KINDS


def open_data(text: str) -> Images:
    """Open ``kind:path#split``.

    Errors: InputError on a kind, split or path that does not exist, or data that is not of that kind.
    """
    described, _, split = text.partition("#")
    kind, _, path = described.partition(":")
    if kind not in _READERS:
        raise InputError(f"data {text!r}: kind {kind!r} is not known", hint=f"KIND:PATH with one of {', '.join(KINDS)}")
    if split not in (*SPLITS, ""):
        raise InputError(f"data {text!r}: split {split!r} is not known", hint=f"known: {', '.join(SPLITS)}")
    if (kind == "digits") == bool(path):
        raise InputError(
            f"data {text!r}: {'digits take no path' if path else 'a path was wanted, as in ' + kind + ':PATH'}"
        )
    return _READERS[kind](Path(path), split or "test")
