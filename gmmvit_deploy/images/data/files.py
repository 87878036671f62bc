"""What the arguments and options of a command name: image files, folders, glob patterns, and kinds of data.

A file is an image if its name says so (`SUFFIXES`) or its first bytes do (`HEAD`). Hidden names, such as
``._photo.jpg`` of macOS, say nothing. The command line imports this module without the readers of the data.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from gmmvit_deploy.errors import InputError

KINDS = ("cifar10", "cifar100", "svhn", "mnist", "tiny-imagenet", "folder", "table", "array", "digits")
"""The kinds of data that the options ``--data`` and ``--calibration`` accept."""
SPLITS = ("test", "train")
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
    *(".jp2", ".j2k", ".avif", ".heic", ".heif", ".pbm", ".pnm", ".dib", ".ico", ".tga", ".pcx", ".sgi", ".xbm"),
    ".dds",
)
"""Endings of the names of image files. HEIF cannot be decoded, but needs an answer that says so."""
_OTHERS = (
    *(".txt", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".md", ".yaml", ".yml", ".html", ".htm", ".log", ".cls"),
    *(".py", ".pt", ".pth", ".npy", ".npz", ".pkl", ".h5", ".onnx", ".safetensors", ".pdf", ".mp4", ".mov", ".parquet"),
    *(".zip", ".gz", ".tar", ".db"),
)
"""Endings of files that are not opened to find out: an object store can hold a caption beside each image."""
HEAD = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|RIFF....WEBP|BM.{4}\0{4}|GIF8[79]a"
    rb"|II[*+]\0|MM\0[*+]"  # TIFF, BigTIFF
    rb"|P[1-6]\s+[#\d]"  # PBM, PGM and PPM
    rb"|\0\0\0\x0cjP  |\xffO\xffQ|....ftyp(?:avi[fs]|hei[cfmsx]|mif1)",  # JPEG 2000, AVIF, HEIF
    re.DOTALL,
)
"""The first bytes of an image file, as in the ``accept`` functions of Pillow's plugins."""
HEAD_BYTES = 16
_SHOWN = 5
_MAX_KINDS = 50
_SPLIT_FOLDERS = {"train", "val", "valid", "validation", "test"}


def is_image(name: str, head: Callable[[], bytes]) -> bool:
    """Return True if a file is an image.  head: returns its first `HEAD_BYTES` bytes."""
    base = name.rpartition("/")[2].lower()
    if base.endswith(SUFFIXES) and not base.startswith("."):
        return True
    return not base.endswith(_OTHERS) and HEAD.match(head()) is not None


def hidden_kind(path: str) -> str:
    """Return the kind in `LeftOut` of a file in a hidden folder below the named one, or ""."""
    folders = path.split("/")[:-1]
    hidden = any(name == "__MACOSX" or (name.startswith(".") and name not in (".", "..")) for name in folders)
    return "in hidden folders" if hidden else ""


def split_folder(path: Path, split: str) -> Path:
    """Return the subfolder of a split, or ``path`` if it has none: a folder ``train`` beside ``bus`` is a class."""
    folder = path / split
    if not folder.is_dir():
        return path
    is_split = bool(_folders(folder)) or set(_folders(path)) <= _SPLIT_FOLDERS
    return folder if is_split else path


def _folders(path: Path) -> list[str]:
    return [file.name for file in path.iterdir() if file.is_dir() and not hidden_kind(f"{file.name}/")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutKind:
    """Files that were left out.  kind: the ending of their names, such as ``.txt``.  first: the name of the first."""

    kind: str
    files: int
    first: str


class LeftOut:
    """Counts the files that a command leaves out, by kind: a source can have millions of them."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str, kind: str = "") -> None:
        """Count a file.  kind: words for the text; empty for the ending of the name."""
        # A name that is not UTF-8 has surrogates, which no output can encode.
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        kind = kind or _kind_of(PurePosixPath(name))
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            kind = "other"
        files, first = self._kinds.get(kind, (0, name))
        self._kinds[kind] = (files + 1, first)

    def kinds(self) -> tuple[LeftOutKind, ...]:
        """Return the kinds, the most frequent first."""
        kinds = [LeftOutKind(kind=kind, files=files, first=first) for kind, (files, first) in self._kinds.items()]
        return tuple(sorted(kinds, key=lambda kind: (-kind.files, kind.kind)))


def _kind_of(path: PurePosixPath) -> str:
    if path.name.startswith("._"):
        return "._*"
    if path.suffix[1:].isdigit():
        return "with a number as suffix"
    return path.suffix.lower() or "without a suffix"


def left_out_text(kinds: Sequence[LeftOutKind]) -> str:
    """Return a text such as ``3 files were left out: 2 .txt (a.txt, …), 1 ._* (._a.jpg)``."""
    if not kinds:
        return "there are no other files"
    files = sum(kind.files for kind in kinds)
    named = [f"{kind.files:,} {kind.kind} ({kind.first}{', …' if kind.files > 1 else ''})" for kind in kinds[:_SHOWN]]
    named += ["…"] if len(kinds) > _SHOWN else []
    return f"{files:,} {'file was' if files == 1 else 'files were'} left out: {', '.join(named)}"


def image_files(arguments: Iterable[str], left_out: LeftOut | None = None) -> list[Path]:
    """Return the files that the arguments name, in the order of the arguments and without duplicates.

    A folder stands for all images below it, a pattern for the images that it matches; their files are sorted.
    Errors: InputError when an argument matches no file, or a folder or a pattern has no image.
    """
    left_out = LeftOut() if left_out is None else left_out
    files: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            images = images_among(path.rglob("*"), path, left_out)
        elif path.exists():
            images = [path]
        else:
            matches = [Path(name) for name in glob.glob(argument, recursive=True)]  # noqa: PTH207
            if not any(match.is_file() for match in matches):
                raise InputError(f"{argument}: no such file or folder, and no file matches it as a pattern")
            root = re.split(r"[*?[]", argument)[0].rpartition("/")[0]
            images = images_among(matches, Path(root), left_out)
        if not images:
            raise InputError(f"{argument}: expected image files, got none; {left_out_text(left_out.kinds())}")
        files += images
    return list(dict.fromkeys(files))


def images_among(paths: Iterable[Path], root: Path, left_out: LeftOut) -> list[Path]:
    """Return the sorted files that are images and not in hidden folders; ``left_out`` gets the others."""
    images = []
    for path in sorted(paths):
        if path.is_file():
            if hidden := hidden_kind(path.relative_to(root).as_posix()):
                left_out.add(str(path), hidden)
            elif is_image(path.name, partial(_head, path)):
                images.append(path)
            else:
                left_out.add(str(path))
    return images


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:  # named among the files that were left out
        return b""
