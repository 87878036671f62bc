"""Bundles: what lies on disk between the steps.

A bundle is the folder that ``export`` writes and every later step reads:

    model.onnx           the folded network, float32
    weights.safetensors  the tensors as trained, under the names the checkpoint gave them
    golden.npz           inputs, raw images, and the logits that eager PyTorch gave (`golden`)
    labels.txt           one class name a line
    manifest.json        `Manifest`: what the rest is, and the SHA-256 of each file
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from gmmvit_deploy.errors import BundleError, InputError
from gmmvit_deploy.golden import GoldenSet, golden_from_bytes, preprocessing_problem
from gmmvit_deploy.preprocess import tensor_from_pixels
from gmmvit_deploy.specs import ModelSpec, spec_from_json, spec_to_json
from gmmvit_deploy.writing import sha256_of_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BUNDLE_FORMAT",
    "Bundle",
    "ConstantRecord",
    "InputKind",
    "Manifest",
    "Preprocessing",
    "open_bundle",
    "tool_versions",
]

BUNDLE_FORMAT = "gmmvit-bundle/2"
MODEL_FILE, WEIGHTS_FILE, GOLDEN_FILE, LABELS_FILE = (
    "model.onnx",
    "weights.safetensors",
    "golden.npz",
    "labels.txt",
)
MANIFEST_FILE = "manifest.json"
_EXPORT_AGAIN = "write it again with gmmvit export"
InputKind = Literal["pixels", "tensor"]


def tool_versions(*also: str) -> dict[str, str]:
    """Of everything that has a hand in what is written, and of the distributions named."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import gmmvit_deploy

    found = {"gmmvit-deploy": gmmvit_deploy.__version__, "python": platform.python_version()}
    for name in ("torch", "onnx", "onnxscript", "onnxruntime", "numpy", "pillow", "safetensors", *also):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


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
        """(inputs, logits): inputs (B, …) as the graph takes them; logits (B, C) float32, from PyTorch at export."""
        found = self.golden_set()
        return found.inputs, found.logits

    def golden_set(self) -> GoldenSet:
        """The contract that every runner is held to.  Errors: BundleError when its file is none."""
        path = self.path / GOLDEN_FILE
        try:
            return golden_from_bytes(path.read_bytes())
        except (OSError, ValueError, KeyError, EOFError) as exc:
            raise BundleError(f"{path}: not the golden inputs of a bundle: {exc}", hint=_EXPORT_AGAIN) from exc

    def inputs_from_pixels(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """uint8 (B, S, S, 3) → what the graph takes.

        Errors: InputError when it takes tensors and nobody said how they are made of images.
        """
        preprocessing = self.manifest.preprocessing
        if self.manifest.input_kind == "pixels":
            return pixels
        if preprocessing is None:
            raise InputError(
                f"{self.path}: it does not say how images are normalised, so images cannot be fed to it",
                hint="export it with --dataset, or --mean --std --labels",
            )
        return tensor_from_pixels(pixels, preprocessing.mean, preprocessing.std)


def open_bundle(path: Path) -> Bundle:
    """Open a bundle and check that it is whole.

    Errors: BundleError when it is no bundle, of another format version, when a file is missing or
    does not match its hash, when the labels are not the manifest's, or when images become other
    pixels here than where it was exported.
    """
    manifest_path = path / MANIFEST_FILE
    if not manifest_path.is_file():
        problem = "holds no manifest.json" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
        raise BundleError(f"{path}: a bundle was wanted, but it {problem}", hint="gmmvit export makes bundles")
    try:
        data = json.loads(manifest_path.read_text(encoding="utf-8"))
        found_format = data.get("format")
        if found_format != BUNDLE_FORMAT:
            raise BundleError(
                f"{path}: format {found_format!r}; this version reads {BUNDLE_FORMAT!r}", hint=_EXPORT_AGAIN
            )
        manifest = Manifest.from_json(data)
    except OSError as exc:
        raise BundleError(f"{manifest_path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, InputError) as exc:
        if isinstance(exc, BundleError):
            raise
        raise BundleError(f"{manifest_path}: not a manifest: {exc}", hint=_EXPORT_AGAIN) from exc
    _check_files(path, manifest, hint=_EXPORT_AGAIN)
    bundle = Bundle(path=path, manifest=manifest)
    _check_contract(bundle)
    return bundle


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


def _check_contract(bundle: Bundle) -> None:
    """Labels are the manifest's, and images become here what they became at export."""
    labels = tuple((bundle.path / LABELS_FILE).read_text(encoding="utf-8").splitlines())
    if labels != bundle.manifest.labels:
        raise BundleError(
            f"{bundle.path}: {LABELS_FILE} is not the manifest's list of labels: {labels[:3]} against "
            f"{bundle.manifest.labels[:3]}",
            hint=_EXPORT_AGAIN,
        )
    how = bundle.manifest.preprocessing
    if how is None:
        return
    problem = preprocessing_problem(bundle.golden_set(), bundle.manifest.spec.image_size, how.mean, how.std)
    if problem:
        from importlib.metadata import version

        raise BundleError(
            f"{bundle.path}: preprocessing: {problem}",
            hint=f"Pillow is {version('pillow')} here and was {bundle.manifest.versions.get('pillow')} at export; "
            "use that one, or export here",
        )
