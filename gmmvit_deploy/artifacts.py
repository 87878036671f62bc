"""What lies on disk between the steps: hashes, folders written whole or not at all, and bundles.

A bundle is the folder that ``export`` writes and every later step reads:

    model.onnx           the folded network, float32
    weights.safetensors  the tensors as trained, under the names the checkpoint gave them
    golden.npz           inputs and the logits that eager PyTorch gave for them
    labels.txt           one class name a line
    manifest.json        `Manifest`: what the rest is, and the SHA-256 of each file
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from gmmvit_deploy.errors import BundleError, InputError, OutputError
from gmmvit_deploy.specs import ModelSpec, spec_from_json, spec_to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BUNDLE_FORMAT",
    "Bundle",
    "ConstantRecord",
    "InputKind",
    "Manifest",
    "Preprocessing",
    "new_file",
    "new_folder",
    "open_bundle",
    "require_free",
    "sha256_of_bytes",
    "sha256_of_file",
    "tool_versions",
]

BUNDLE_FORMAT = "gmmvit-bundle/1"
MODEL_FILE, WEIGHTS_FILE, GOLDEN_FILE, LABELS_FILE = (
    "model.onnx",
    "weights.safetensors",
    "golden.npz",
    "labels.txt",
)
MANIFEST_FILE = "manifest.json"
InputKind = Literal["pixels", "tensor"]


def tool_versions() -> dict[str, str]:
    """Of everything that has a hand in what is written."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import gmmvit_deploy

    found = {"gmmvit-deploy": gmmvit_deploy.__version__, "python": platform.python_version()}
    for name in ("torch", "onnx", "onnxscript", "onnxruntime", "numpy", "pillow", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def sha256_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces.  Errors: OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def new_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes ``path`` when the block ends well, else it is gone.

    The work is done beside ``path`` and renamed, so nobody ever sees half of it.
    force: replace what stands at ``path``, once the new folder is complete.
    Errors: OutputError when ``path`` exists and ``force`` is not set, or when the disk refuses.
    """
    path = Path(os.path.abspath(path))
    require_free(path, force=force)
    created: list[Path] = []
    staging: Path | None = None
    try:
        try:
            created = _make_parents(path.parent)
            staging = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.partial-"))
            yield staging
            _publish(staging, path, force=force)
        except OSError as exc:
            raise OutputError(
                f"{path}: cannot be written: {exc.strerror or exc}; nothing was left behind",
                hint="choose another place with -o, or make room",
            ) from exc
    except BaseException:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for folder in reversed(created):
            folder.rmdir()
        raise


def require_free(path: Path, *, force: bool) -> None:
    """Errors: OutputError when something stands at ``path`` that a new folder may not replace."""
    if os.path.lexists(path) and not force:
        raise OutputError(f"{path} exists", hint="choose another place with -o, or replace it with --force")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OutputError(f"{path} is no folder, so --force does not replace it", hint="remove it by hand")


def _make_parents(parent: Path) -> list[Path]:
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    created: list[Path] = []
    for folder in reversed(missing):
        folder.mkdir()
        created.append(folder)
    return created


def _publish(staging: Path, path: Path, *, force: bool) -> None:
    staging.chmod(0o777 & ~_umask())  # mkdtemp made it private
    require_free(path, force=force)  # somebody else may have been faster
    if not path.exists():
        staging.rename(path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.replaced-"))
    path.rename(old / path.name)
    try:
        staging.rename(path)
    except OSError:
        (old / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_file(path: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to write; it becomes ``path`` when the block ends well, else it is gone.

    Errors: OutputError when ``path`` exists and ``force`` is not set, or when the disk refuses.
    """
    if os.path.lexists(path) and (not force or path.is_dir()):
        raise OutputError(f"{path} exists", hint="choose another name, or replace the file with --force")
    staging: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.partial-")
        staging = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
        staging.chmod(0o666 & ~_umask())
        staging.replace(path)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written: {exc.strerror or exc}; nothing was left behind",
            hint="choose another place, or make room",
        ) from exc
    finally:
        if staging is not None:
            staging.unlink(missing_ok=True)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """Image → input of the network: RGB, resize to S×S (bilinear, antialiased), to [0, 1], normalise.

    mean, std: of R, G and B, for values in [0, 1].
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(math.isfinite(value) for value in values):
                raise InputError(f"{name} is {values}; three finite numbers were wanted, for R, G and B")
        if min(self.std) <= 0:
            raise InputError(f"std is {self.std}; numbers above 0 were wanted")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRecord:
    """What became of the mask, or of the bias on the scores, of one layer.

    trained_sha256: of the little-endian float32 bytes of the matrix that the trained module
    multiplies by, or adds; constant_sha256: likewise of the constant in the graph, for a mask M·d^(−1/2).
    constant: name of that constant in ``model.onnx``.  shape: of both.
    """

    layer: str
    shape: tuple[int, ...]
    trained_sha256: str
    constant_sha256: str
    constant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a bundle says about itself.  `to_json` and `from_json` are inverse.

    checkpoint: name, SHA-256 and wrapping of the file it came from.
    preprocessing: None when the input is ``tensor`` and nobody said how it is made.
    export_parity: the largest difference seen when the bundle was made, and its limit.
    float32_noise: largest difference of PyTorch's float32 and float64 logits on the golden inputs.
    files: name → SHA-256, of all files but the manifest.
    """

    spec: ModelSpec
    trainable_parameters: int
    checkpoint: dict[str, str]
    input_kind: InputKind
    max_batch: int
    preprocessing: Preprocessing | None
    labels: tuple[str, ...]
    opset: int
    folding: tuple[str, ...]
    masks: tuple[ConstantRecord, ...]
    biases: tuple[ConstantRecord, ...]
    export_parity: dict[str, float]
    float32_noise: float
    versions: dict[str, str]
    files: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        data["spec"] = spec_to_json(self.spec)
        data["preprocessing"] = asdict(self.preprocessing) if self.preprocessing else None
        for name in ("masks", "biases"):
            data[name] = [asdict(record) for record in data[name]]
        return {"format": BUNDLE_FORMAT, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Errors: KeyError, TypeError, ValueError or SpecError when it is no such manifest."""
        fields = {name: value for name, value in data.items() if name != "format"}
        if fields["input_kind"] not in get_args(InputKind):
            raise ValueError(f"input kind {fields['input_kind']!r}")
        fields["spec"] = spec_from_json(fields["spec"])
        if fields["preprocessing"] is not None:
            fields["preprocessing"] = Preprocessing(
                mean=tuple(fields["preprocessing"]["mean"]), std=tuple(fields["preprocessing"]["std"])
            )
        for name in ("masks", "biases"):
            fields[name] = tuple(ConstantRecord(**{**m, "shape": tuple(m["shape"])}) for m in fields[name])
        for name in ("labels", "folding"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle that was found whole: every file there, every hash right."""

    path: Path
    manifest: Manifest

    @property
    def onnx_path(self) -> Path:
        return self.path / MODEL_FILE

    @property
    def weights_path(self) -> Path:
        return self.path / WEIGHTS_FILE

    @property
    def sha256(self) -> str:
        """Names this bundle: the hash of its manifest, which holds the hash of everything else."""
        return sha256_of_file(self.path / MANIFEST_FILE)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Of one input, without the batch."""
        size = self.manifest.spec.image_size
        return (size, size, 3) if self.manifest.input_kind == "pixels" else (3, size, size)

    @property
    def input_dtype(self) -> str:
        """As numpy writes it."""
        return "uint8" if self.manifest.input_kind == "pixels" else "float32"

    def golden(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """(inputs, logits): the contract that every runner is held to.

        inputs (B, …) as the graph takes them; logits (B, C) float32, from eager PyTorch at export.
        """
        import numpy as np

        with np.load(self.path / GOLDEN_FILE, allow_pickle=False) as file:
            return file["inputs"], file["logits"]


def open_bundle(path: Path) -> Bundle:
    """Open a bundle and check that it is whole.

    Errors: BundleError when it is no bundle, of another format version, or when a file is missing
    or does not match its hash.
    """
    export_again = "write it again with gmmvit export"
    manifest_path = path / MANIFEST_FILE
    if not manifest_path.is_file():
        problem = "holds no manifest.json" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
        raise BundleError(f"{path}: a bundle was wanted, but it {problem}", hint="gmmvit export makes bundles")
    try:
        data = json.loads(manifest_path.read_text(encoding="utf-8"))
        found_format = data.get("format")
        if found_format != BUNDLE_FORMAT:
            raise BundleError(
                f"{path}: format {found_format!r}; this version reads {BUNDLE_FORMAT!r}", hint=export_again
            )
        manifest = Manifest.from_json(data)
    except OSError as exc:
        raise BundleError(f"{manifest_path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, InputError) as exc:
        if isinstance(exc, BundleError):
            raise
        raise BundleError(f"{manifest_path}: not a manifest: {exc}", hint=export_again) from exc
    _check_files(path, manifest, hint=export_again)
    return Bundle(path=path, manifest=manifest)


def _check_files(path: Path, manifest: Manifest, *, hint: str) -> None:
    required = {MODEL_FILE, WEIGHTS_FILE, GOLDEN_FILE, LABELS_FILE}
    if unlisted := required - manifest.files.keys():
        raise BundleError(f"{path}: the manifest lists no {', '.join(sorted(unlisted))}", hint=hint)
    for name, expected in manifest.files.items():
        file = path / name
        if Path(name).name != name or not file.is_file():
            raise BundleError(f"{path}: {name} is missing", hint=hint)
        try:
            found = sha256_of_file(file)
        except OSError as exc:
            raise BundleError(f"{file}: cannot be read: {exc.strerror}") from exc
        if found != expected:
            raise BundleError(
                f"{file}: its SHA-256 is {found[:12]}…, the manifest has {expected[:12]}…: it was changed or damaged",
                hint=hint,
            )
