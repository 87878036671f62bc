"""Read the files of data sets as `Images`, without running code from the files."""

from __future__ import annotations

import csv
import gzip
import io
import pickle
import struct
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.data.files import LeftOut, hidden_kind, images_among, split_folder
from gmmvit_deploy.images.data.images import ArrayImages, FileImages, Images, Label
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.names import clean_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIDE = 32  # the height and the width of CIFAR images, in pixels
_DIGITS_SEED, _HELD_OUT = 7, 360


def cifar(path: Path, split: str, *, classes: int) -> Images:
    """Read CIFAR-10 or CIFAR-100 (``classes``) in the Python or the binary version, packed or unpacked."""
    import numpy as np

    stems = {
        (10, "test"): ["test_batch"],
        (10, "train"): [f"data_batch_{number}" for number in range(1, 6)],
        (100, "test"): ["test"],
        (100, "train"): ["train"],
    }[classes, split]
    present = _members(path)
    if set(stems) <= present:
        parts = [_cifar_python(_member(path, stem), f"{path}: {stem}", classes) for stem in stems]
    elif {f"{stem}.bin" for stem in stems} <= present:
        parts = [_cifar_binary(_member(path, f"{stem}.bin"), f"{path}: {stem}.bin", classes) for stem in stems]
    else:
        expected = f"{stems[0]} or {stems[0]}.bin"
        raise InputError(
            f"{path}: expected CIFAR-{classes} in this folder or archive, but the file {expected} is missing",
            hint="type the path of the downloaded archive, or of the folder to which the archive unpacks",
        )
    images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    name = f"cifar{classes}"
    return ArrayImages(f"{name} {split}", images, labels, DATASETS[name].labels)


def _cifar_python(data: bytes, name: str, classes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    import numpy as np

    arrays = _arrays_from_pickle(data, name)
    rows, labels = arrays.get("data"), arrays.get("labels" if classes == 10 else "fine_labels")
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or labels is None:
        raise InputError(f"{name}: expected data and labels of CIFAR-{classes}, got {', '.join(sorted(arrays))}")
    return _planes(rows, name), np.asarray(labels)


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
"""(module, name) of the functions and classes that a pickle of arrays imports.

These functions and classes only create arrays; other functions could run any code.
"""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Import a function or class of `_ADMITTED`.  Errors: InputError when the name is not in `_ADMITTED`."""
        if (module, name) not in _ADMITTED:
            raise InputError(
                f"the file was not loaded, because the pickle in the file calls {module}.{name}, which creates no "
                "array; no code of the file was run"
            )
        return super().find_class(module, name)


def _arrays_from_pickle(data: bytes, name: str) -> dict[str, Any]:
    """Return the pickled dictionary with its keys as text, without running code from the file.

    Errors: InputError when the pickle contains more than arrays, is damaged, or is not a dictionary.
    """
    try:
        loaded = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except InputError as exc:
        raise InputError(f"{name}: {exc}") from exc
    # A damaged pickle can raise almost any exception.
    except Exception as exc:
        raise InputError(f"{name}: expected a pickle of arrays: {exc}") from exc
    if not isinstance(loaded, dict):
        raise InputError(f"{name}: expected a dictionary, got {type(loaded).__name__}")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in loaded.items()}


def _cifar_binary(data: bytes, name: str, classes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    import numpy as np

    head = 1 if classes == 10 else 2  # in CIFAR-100 the coarse label precedes the fine label
    width = head + 3 * _SIDE**2
    if not data or len(data) % width:
        raise InputError(
            f"{name}: expected a multiple of {width} bytes ({head} of labels and {3 * _SIDE**2} of pixels per image), "
            f"got {len(data)} bytes"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, width)
    return _planes(rows[:, head:], name), rows[:, head - 1].astype(np.int64)


def _planes(rows: NDArray[Any], name: str) -> NDArray[Any]:
    """Convert rows (N, 3072), a red, a green and a blue plane, to images (N, 32, 32, 3).  Errors: InputError."""
    if rows.shape[1] != 3 * _SIDE**2:
        raise InputError(f"{name}: expected {3 * _SIDE**2} values per image, got {rows.shape[1]}")
    images: NDArray[Any] = rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return images


def svhn(path: Path, split: str) -> Images:
    """Read the cropped digits of SVHN, whose class 10 is the digit 0.  path: ``{split}_32x32.mat`` or its folder."""
    loadmat = require("scipy.io", package="scipy", extra="demo").loadmat
    file = path / f"{split}_32x32.mat" if path.is_dir() else path
    try:
        arrays = loadmat(io.BytesIO(file.read_bytes()))
        images, labels = arrays["X"].transpose(3, 0, 1, 2), arrays["y"].reshape(-1) % 10
    except FileNotFoundError as exc:
        raise InputError(f"{file}: no such file") from exc
    # scipy's reader raises various exceptions on damaged files.
    except Exception as exc:
        raise InputError(f"{file}: expected a .mat file of SVHN's cropped digits: {exc}") from exc
    return ArrayImages(f"svhn {file.name}", images, labels, DATASETS["svhn"].labels)


def idx(path: Path, split: str) -> Images:
    """Read MNIST, or files with its format and names, plain or compressed; ``test`` is ``t10k-images-idx3-ubyte``."""
    stem = "t10k" if split == "test" else "train"
    present = _members(path)
    arrays = []
    for kind, dims in (("images-idx3", 3), ("labels-idx1", 1)):
        plain = f"{stem}-{kind}-ubyte"
        name = plain if plain in present else f"{plain}.gz"
        arrays.append(_idx(_member(path, name), f"{path}: {name}", dims))
    return ArrayImages(f"mnist {split}", arrays[0], arrays[1], tuple("0123456789"))


def _idx(data: bytes, name: str, dims: int) -> NDArray[Any]:
    import numpy as np

    start = 4 + 4 * dims
    if len(data) < start or data[:4] != bytes((0, 0, 8, dims)):
        raise InputError(f"{name}: expected an IDX file of unsigned bytes with {dims} dimension{'s' * (dims > 1)}")
    shape = struct.unpack(f">{dims}I", data[4:start])
    if len(data) - start != int(np.prod(shape)):
        raise InputError(f"{name}: expected {int(np.prod(shape))} values after the header, got {len(data) - start}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def tiny_imagenet(path: Path, split: str) -> Images:
    """Read the folder of Tiny-ImageNet; a class index is the place of its WordNet ID in the sorted ``wnids.txt``."""
    try:
        order = {name: index for index, name in enumerate(sorted((path / "wnids.txt").read_text().split()))}
        if split == "train":
            files = sorted((path / "train").glob("*/images/*.JPEG"))
            names = [file.parent.parent.name for file in files]
        else:
            lines = [line.split("\t") for line in (path / "val" / "val_annotations.txt").read_text().splitlines()]
            files = [path / "val" / "images" / line[0] for line in lines]
            names = [line[1] for line in lines]
        labels = [order[name] for name in names]
    except (OSError, KeyError, IndexError) as exc:
        raise InputError(
            f"{path}: expected the folder of Tiny-ImageNet: {exc}",
            hint="type tiny-imagenet:PATH with the path of the folder tiny-imagenet-200",
        ) from exc
    return FileImages(f"tiny-imagenet {split}", files, labels, DATASETS["tiny-imagenet"].labels)


def class_folders(path: Path, split: str) -> Images:
    """Read a folder of images with a subfolder for each class, or without subfolders and without classes.

    The sorted names of the subfolders, as `clean_name` has them, are the classes. If ``path`` has a subfolder for the
    split (`split_folder`), the images are read from it.
    Errors: InputError when ``path`` is not a folder, contains no image, or a name is not UTF-8.
    """
    root = split_folder(path, split)
    if not root.is_dir():
        raise InputError(f"{path}: expected a folder of images, or a folder with a subfolder of images per class")
    paths = sorted(root.iterdir())
    # Hidden folders of Jupyter, and the folder that macOS adds to zip files, are no classes.
    folders = [path for path in paths if path.is_dir() and not hidden_kind(f"{path.name}/")]
    left_out = LeftOut()
    files = [file for folder in folders or [root] for file in images_among(folder.rglob("*"), root, left_out)]
    if folders:
        for other in (path for path in paths if path not in folders):
            for file in images_among(other.rglob("*") if other.is_dir() else [other], root, left_out):
                left_out.add(str(file), "outside the class folders")
    name_of = {folder.name: clean_name(folder.name, str(root)) for folder in folders}
    classes = tuple(sorted(set(name_of.values())))
    labels = [classes.index(name_of[file.relative_to(root).parts[0]]) for file in files] if classes else None
    return FileImages(str(root), files, labels, classes, left_out=left_out.kinds())


def table(path: Path) -> Images:
    """Read a table of multi-label images: a .csv file with a row for each image.

        file,4,even
        images/a.png,1,1
        images/b.png,0,0

    The paths are relative to the table. Every other column is a label, with 1 for the images that have it, else 0.
    Errors: InputError with the line that has another form.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InputError(f"{path}: expected a .csv file: {reason}", hint="type --data table:FILE.csv") from exc
    names = [name.strip() for name in head]
    if names[:1] != ["file"] or len(names) < 2:
        raise InputError(
            f"{path}: expected a first line with file and the labels, such as file,4,even; got {','.join(names[:4])}",
            hint="name the column of the paths file, and write a column of 0 and 1 for each label",
        )
    classes = tuple(clean_name(name, str(path)) for name in names[1:])
    labels: list[Label] = []
    for number, row in enumerate(rows, 2):
        values = [value.strip() for value in row[1:]]
        if len(row) != len(names) or not set(values) <= {"0", "1"}:
            raise InputError(
                f"{path}, line {number}: expected a path and {len(names) - 1} values of 0 or 1, got "
                f"{','.join(row)[:60]}"
            )
        labels.append(tuple(index for index, value in enumerate(values) if value == "1"))
    return FileImages(str(path), [path.parent / row[0].strip() for row in rows], labels, classes)


def arrays_in(path: Path) -> dict[str, NDArray[Any]]:
    """Return name → array of an .npz file, or ``images`` → array of an .npy file.  Errors: InputError."""
    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        return {"images": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file") from exc
    except (OSError, ValueError, EOFError) as exc:
        raise InputError(f"{path}: expected an .npz or .npy file of plain arrays: {exc}") from exc


def array_file(path: Path) -> Images:
    """Read an .npz file with ``images`` and optionally ``labels``, or an .npy file of images.  Errors: InputError.

    ``labels`` holds class indices (N,) or, for multi-label data, 0 and 1 for each class (N, C).
    """
    arrays = arrays_in(path)
    if "images" not in arrays:
        raise InputError(f"{path}: expected an array called images, got {', '.join(arrays) or 'no array'}")
    return ArrayImages(path.name, arrays["images"], arrays.get("labels"))


def digits(split: str) -> Images:
    """Return scikit-learn's grey digits, (N, 8, 8).  ``test``: the 360 that ``gmmvit demo`` does not train on."""
    import numpy as np

    bunch = require("sklearn.datasets", package="scikit-learn", extra="demo").load_digits()
    grey = (bunch.images * (255 / 16)).round().astype(np.uint8)
    order = np.random.default_rng(_DIGITS_SEED).permutation(len(grey))
    chosen = order[:_HELD_OUT] if split == "test" else order[_HELD_OUT:]
    return ArrayImages(f"digits {split}", grey[chosen], bunch.target[chosen], tuple("0123456789"))


_BROKEN = (OSError, EOFError, tarfile.TarError, zlib.error)
"""Exceptions that reading a damaged archive raises."""


def _members(path: Path) -> set[str]:
    """Return the names of all files below a folder or in a tar archive.  Errors: InputError for anything else."""
    if path.is_dir():
        return {file.name for file in path.rglob("*") if file.is_file()}
    return {Path(name).name for name in _archive_names(path)}


def _member(path: Path, name: str) -> bytes:
    """Return the content of the only file called ``name``, decompressed if it ends in .gz.  Errors: InputError."""
    try:
        if path.is_dir():
            (only,) = [file for file in path.rglob("*") if file.name == name and file.is_file()]
            data = only.read_bytes()
        else:
            (full,) = [full for full in _archive_names(path) if Path(full).name == name]
            with tarfile.open(path) as archive:
                file = archive.extractfile(full)
                data = file.read() if file else b""
        return gzip.decompress(data) if name.endswith(".gz") else data
    except ValueError as exc:
        raise InputError(f"{path}: expected exactly one file called {name} in this folder or archive") from exc
    except _BROKEN as exc:
        raise InputError(f"{path}: {name} cannot be read: {exc}") from exc


def _archive_names(path: Path) -> list[str]:
    try:
        with tarfile.open(path) as archive:
            return [entry.name for entry in archive if entry.isfile()]
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file or folder") from exc
    except _BROKEN as exc:
        raise InputError(f"{path}: expected a folder or a tar archive: {exc}") from exc
