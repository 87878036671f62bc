"""Read bundles.  A bundle is the folder that ``gmmvit export`` writes and every later step reads.

Contents of a bundle:

    model.onnx           the folded network, float32; weights of 1.5 GB or more are in model.onnx.data
    weights.safetensors  the trained tensors, named after the modules of this package (`checkpoints.weights`)
    golden.npz           inputs, encoded images, and PyTorch's logits for the inputs and the images (`golden`)
    labels.txt           a class name per line
    manifest.json        `Manifest`: describes the model and lists the SHA-256 of every other file
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from gmmvit_deploy.bundle.golden import GoldenSet, golden_from_bytes, preprocessing_problem
from gmmvit_deploy.errors import READABLE_HINT, BundleError, InputError
from gmmvit_deploy.files.kinds import refuse_checkpoint
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.graphs.constants import ConstantRecord
from gmmvit_deploy.images.resize_rules import STATE_PREPROCESSING
from gmmvit_deploy.images.spec import ImageSpec, image_from_json
from gmmvit_deploy.inference.labels import TASKS, LabelSet, Task
from gmmvit_deploy.models.families import spec_from_json, spec_to_json
from gmmvit_deploy.models.specs import OUTPUTS, ModelSpec, OutputName, input_shape
from gmmvit_deploy.tolerances import Noise

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUNDLE_FORMAT = "gmmvit-bundle/4"
MODEL_FILE, WEIGHTS_FILE, GOLDEN_FILE, LABELS_FILE = "model.onnx", "weights.safetensors", "golden.npz", "labels.txt"
MANIFEST_FILE = "manifest.json"
_MAX_BATCH, _MAX_BLOCKS = 2**20, 1000
"""Bounds of a manifest, which can come from a stranger: a model of a million blocks takes minutes to build."""
_EXPORT = "type gmmvit export CHECKPOINT -o BUNDLE to make a bundle"
_EXPORT_AGAIN = "type gmmvit export CHECKPOINT -o BUNDLE --force to write the bundle again"
InputKind = Literal["pixels", "tensor"]
OutputMeaning = Literal["class logits", "pooled features"]
"""Meaning of an output's values.  ``class logits``: a logit per class, in the order of the labels.
``pooled features``: the values that the classifier head reads, or would read in a network without a classifier."""
MEANINGS: dict[OutputName, OutputMeaning] = {"logits": "class logits", "features": "pooled features"}

_OR_ELSE = ("onnxruntime-gpu",)
"""Distributions that replace another of the list."""


def tool_versions(*also: str) -> dict[str, str]:
    """Return name → version of the toolkit, Python, the packages used for export, and the distributions in ``also``.

    The version of a missing distribution is ``not installed``. ONNX Runtime for GPUs is listed only if installed.
    """
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import gmmvit_deploy

    versions = {"gmmvit-deploy": gmmvit_deploy.__version__, "python": platform.python_version()}
    for name in ("torch", "onnx", "onnxscript", "onnxruntime", *_OR_ELSE, "numpy", "pillow", "safetensors", *also):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            if name not in _OR_ELSE:
                versions[name] = "not installed"
    return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRecord:
    """An output of the network.  name: in the graph.  shape: of a single image, without the batch dimension.

    pooling: of features, the vector of the tokens that they are, such as ``class token``.
    unit_length: True for features that the graph divides by their length.
    """

    name: OutputName
    shape: tuple[int, ...]
    meaning: OutputMeaning
    pooling: str = ""
    unit_length: bool = False

    @property
    def words(self) -> str:
        """What follows the name and the shape of features where a person reads them, such as ``, class token``."""
        return f", {self.pooling}{', of unit length' if self.unit_length else ''}" if self.pooling else ""

    def __post_init__(self) -> None:
        if MEANINGS.get(self.name) != self.meaning:
            raise ValueError(f"output {self.name!r}: expected one of {', '.join(MEANINGS)}, with its meaning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of ``manifest.json``.  `to_json` and `from_json` are inverse functions.

    checkpoint: name, SHA-256 and wrapping of the checkpoint file; the wrapping is the form of the file's content.
    unused_keys: key of a checkpoint's tensor that the network never reads → reason. The bundle omits these tensors.
    input_kind, max_batch: as in `ExportOptions`.
    image: its mean and std are None if ``input_kind`` is ``tensor`` and no normalisation was given at export.
    outputs: in the order of the graph's outputs.
    labels: the class names in the order of the class index; empty without logits.
    opset: the version of the ONNX operators.  folding: the names of the folding passes that changed the model.
    masks, biases: the record of the mask and of the bias on the attention scores of each layer.
    export_parity: runner → largest difference from PyTorch's logits at export. Two entries are no runners: the limit of
    these differences, and the spread, the largest difference of PyTorch's logits of a class between two golden inputs.
    export_skipped: runner → reason why export left the runner out.
    wrong_runners: those of them that the machine of the export has, but that cannot run the graph, or give other
    outputs than PyTorch. Such a runner is taken only if somebody names it, and holds itself to the golden outputs.
    float32_noise: the largest difference between PyTorch's float32 and float64 logits on the golden inputs, the inputs
    in ``golden.npz``. For a bundle without logits, the noise of the features.
    thresholds: the threshold of each class of a multi-label network, between 0 and 1; empty for single-label.
    features_noise: the same for the features of a bundle with logits and features; 0 for other bundles.
    versions: name → version of the toolkit, Python and packages at export.
    files: file name → SHA-256, for every file except the manifest.
    taken_from: what no tensor of the checkpoint shows, such as ``heads`` → where the value comes from, such as
    ``--set heads=4``; for the preprocessing and the labels, only what the user did not type; ``graphs`` → the bundle of
    other classes that they were taken from (`exporting.other_classes`).
    Errors: ValueError when the size of ``image`` contradicts ``spec``, or when ``pixels`` has no mean and std.
    """

    spec: ModelSpec
    trainable_parameters: int
    checkpoint: dict[str, str]
    unused_keys: dict[str, str]
    input_kind: InputKind
    max_batch: int
    image: ImageSpec
    task: Task
    outputs: tuple[OutputRecord, ...]
    labels: tuple[str, ...]
    opset: int
    folding: tuple[str, ...]
    masks: tuple[ConstantRecord, ...]
    biases: tuple[ConstantRecord, ...]
    export_parity: dict[str, float]
    export_skipped: dict[str, str]
    float32_noise: float
    versions: dict[str, str]
    files: dict[str, str]
    taken_from: dict[str, str] = field(default_factory=dict)
    features_noise: float = 0.0
    thresholds: tuple[float, ...] = ()
    wrong_runners: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.image.tensor_shape != input_shape(self.spec):
            raise ValueError(
                f"image: expected {input_shape(self.spec)} as (channels, height, width), got {self.image.tensor_shape}"
            )
        if not isinstance(self.max_batch, int) or not 1 <= self.max_batch <= _MAX_BATCH:
            raise ValueError(f"max_batch: expected a number from 1 to {_MAX_BATCH}, got {self.max_batch!r}")
        if not all(isinstance(digest, str) for digest in self.files.values()):
            raise ValueError("files: expected a SHA-256 for each file")
        for noise in ("float32_noise", "features_noise"):
            if not 0 <= getattr(self, noise) < math.inf:  # False for NaN
                raise ValueError(f"{noise}: expected a number of at least 0, got {getattr(self, noise)!r}")
        depths = getattr(self.spec, "depths", (getattr(self.spec, "depth", 1),))
        _ = self.label_set  # checks the task and the thresholds
        if self.output_names not in OUTPUTS:
            raise ValueError(f"outputs: expected logits, features, or both, got {', '.join(self.output_names)}")
        if sum(depths) > _MAX_BLOCKS:
            raise ValueError(f"spec: expected at most {_MAX_BLOCKS} blocks, got {sum(depths)}")
        if self.input_kind == "pixels" and self.image.normalisation is None:
            raise ValueError("image: expected mean and std, because input_kind is pixels, got no values")

    @property
    def output_names(self) -> tuple[OutputName, ...]:
        """The names of the outputs.  The first output is the answer of every runner."""
        return tuple(output.name for output in self.outputs)

    @property
    def unit_length(self) -> bool:
        """True if the features have unit length."""
        return any(output.unit_length for output in self.outputs)

    @property
    def label_set(self) -> LabelSet:
        """The labels, and how logits become labels."""
        return LabelSet(labels=self.labels, task=self.task, thresholds=self.thresholds)

    @property
    def has_logits(self) -> bool:
        """True if the network has logits, so that it classifies."""
        return "logits" in self.output_names

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        data["spec"] = spec_to_json(self.spec)
        data["image"] = self.image.to_json()
        for name in ("masks", "biases", "outputs"):
            data[name] = [asdict(record) for record in data[name]]
        return {"format": BUNDLE_FORMAT, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Rebuild a manifest.  Errors: KeyError, TypeError, ValueError or InputError for ``data`` of another form."""
        fields = {name: value for name, value in data.items() if name != "format"}
        for name, known in (("input_kind", get_args(InputKind)), ("task", TASKS)):
            if fields[name] not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {fields[name]!r}")
        fields["spec"] = spec_from_json(fields["spec"])
        fields["image"] = image_from_json(fields["image"])
        fields["outputs"] = tuple(OutputRecord(**{**o, "shape": tuple(o["shape"])}) for o in fields["outputs"])
        for name in ("masks", "biases"):
            fields[name] = tuple(ConstantRecord(**{**c, "shape": tuple(c["shape"])}) for c in fields[name])
        for name in ("labels", "folding", "thresholds", "wrong_runners"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An opened bundle.  When the bundle was opened, every file was present and matched the hash in the manifest."""

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
        """SHA-256 of the manifest.  It identifies the bundle, because the manifest has the hash of every other file."""
        return sha256_of_file(self.path / MANIFEST_FILE)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of a single input, without the batch dimension."""
        image = self.manifest.image
        return image.pixels_shape if self.manifest.input_kind == "pixels" else image.tensor_shape

    @property
    def input_dtype(self) -> str:
        """Name of the numpy dtype of the inputs."""
        return "uint8" if self.manifest.input_kind == "pixels" else "float32"

    def golden(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (inputs, logits): the golden inputs (B, …) of the graph, and PyTorch's float32 logits (B, C)."""
        stored = self.golden_set()
        return stored.inputs, stored.logits

    def golden_rows(self) -> tuple[NDArray[Any], dict[OutputName, NDArray[Any]]]:
        """Return (inputs (B, …), name of an output → PyTorch's values (B, …)): golden inputs, then golden images."""
        import numpy as np

        golden = self.golden_set()
        inputs = [golden.inputs, *([self.inputs_from_pixels(golden.image_pixels)] if golden.images else [])]
        outputs = {golden.output: np.concatenate([golden.logits, golden.image_logits][: len(inputs)])}
        if golden.features is not None and golden.image_features is not None:
            outputs["features"] = np.concatenate([golden.features, golden.image_features][: len(inputs)])
        return np.concatenate(inputs), outputs

    def stored_noise(self, stored: NDArray[Any], *, features: bool = False) -> Noise:
        """Return the float32 noise that export recorded.  stored: (B, C), golden logits or golden features."""
        largest = self.manifest.features_noise if features else self.manifest.float32_noise
        return Noise(largest=largest, rms=largest, scale=float(abs(stored).max()))

    def golden_set(self) -> GoldenSet:
        """Read the golden inputs and images, and PyTorch's logits, which the logits of every runner are compared with.

        Errors: BundleError when ``golden.npz`` is missing or cannot be read, or when its arrays contradict each other.
        """
        path = self.path / GOLDEN_FILE
        try:
            return golden_from_bytes(path.read_bytes())
        except (OSError, ValueError, KeyError, EOFError) as exc:
            raise BundleError(f"{path}: expected the reference inputs of a bundle: {exc}", hint=_EXPORT_AGAIN) from exc

    def inputs_from_pixels(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Convert uint8 pixels (B, height, width, channels) to inputs of the graph.

        Errors: InputError when the graph takes normalised tensors, but the bundle has no mean and std.
        """
        if self.manifest.input_kind == "pixels":
            return pixels
        if self.manifest.image.normalisation is None:
            raise InputError(
                f"{self.path}: the bundle has no mean and std, which are needed to normalise images for the graph",
                hint=STATE_PREPROCESSING,
            )
        return self.manifest.image.tensor_from_pixels(pixels)


def open_bundle(path: Bundle | Path | str) -> Bundle:
    """Open a bundle and check it: files, hashes, labels and preprocessing.  An opened bundle is returned as it is.

    Example: ``open_bundle("bundle").manifest.labels``.
    Errors: BundleError when

    - ``path`` is not a bundle, or its format version is not supported;
    - a file is missing or does not match its hash;
    - the labels differ from the labels in the manifest;
    - preprocessing converts the golden images to other pixels than at export.
    """
    if isinstance(path, Bundle):
        return path
    path = Path(path)
    bundle = Bundle(path=path, manifest=_read_manifest(path))
    _check_files(bundle)
    _check_contract(bundle)
    return bundle


def _read_manifest(path: Path) -> Manifest:
    manifest_path = path / MANIFEST_FILE
    if not manifest_path.is_file():
        refuse_checkpoint(path)
        problem = "has no manifest.json" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise BundleError(f"{path}: expected a bundle, but this path {problem}", hint=_EXPORT)
    try:
        data = json.loads(manifest_path.read_text(encoding="utf-8"))
        bundle_format = data.get("format")
        if bundle_format is None:
            raise BundleError(f"{path}: expected a bundle, but its manifest.json is not that of a bundle", hint=_EXPORT)
        if bundle_format != BUNDLE_FORMAT:
            raise BundleError(
                f"{path}: expected a bundle of format {BUNDLE_FORMAT!r}, got {bundle_format!r}",
                hint=_EXPORT_AGAIN,
            )
        manifest = Manifest.from_json(data)
    except OSError as exc:
        raise BundleError(f"{manifest_path}: cannot be read: {exc.strerror}", hint=READABLE_HINT) from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError) as exc:
        if isinstance(exc, BundleError):
            raise
        raise BundleError(f"{manifest_path}: expected a manifest of a bundle: {exc}", hint=_EXPORT_AGAIN) from exc
    return manifest


def _check_files(bundle: Bundle) -> None:
    path, files = bundle.path, bundle.manifest.files
    required = {MODEL_FILE, WEIGHTS_FILE, GOLDEN_FILE, LABELS_FILE}
    if unlisted := required - files.keys():
        raise BundleError(f"{path}: the manifest does not list {', '.join(sorted(unlisted))}", hint=_EXPORT_AGAIN)
    for name, expected in files.items():
        file = path / name
        if Path(name).name != name or not file.is_file():
            raise BundleError(f"{path}: the file {name} is missing", hint=_EXPORT_AGAIN)
        try:
            digest = sha256_of_file(file)
        except OSError as exc:
            raise BundleError(f"{file}: cannot be read: {exc.strerror}", hint=READABLE_HINT) from exc
        if digest != expected:
            raise BundleError(
                f"{file}: the file was changed or damaged: expected the manifest's SHA-256 {expected[:12]}…, got "
                f"{digest[:12]}…",
                hint=_EXPORT_AGAIN,
            )


def _check_contract(bundle: Bundle) -> None:
    """Check that the labels match the manifest, and that preprocessing produces the same pixels as at export."""
    labels = tuple((bundle.path / LABELS_FILE).read_text(encoding="utf-8").splitlines())
    if labels != bundle.manifest.labels:
        raise BundleError(
            f"{bundle.path}: expected the manifest's labels in {LABELS_FILE}, beginning {bundle.manifest.labels[:3]}, "
            f"got {labels[:3]}",
            hint=_EXPORT_AGAIN,
        )
    if bundle.manifest.image.normalisation is None:
        return
    if problem := preprocessing_problem(bundle.golden_set(), bundle.manifest.image):
        from importlib.metadata import version

        raise BundleError(
            f"{bundle.path}: preprocessing: {problem}",
            hint=f"install Pillow {bundle.manifest.versions.get('pillow')}, the version at export (this machine has "
            f"Pillow {version('pillow')}), or export the checkpoint again on this machine",
        )
