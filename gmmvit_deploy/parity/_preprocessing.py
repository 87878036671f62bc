"""Check the preprocessing contract: encoded image → pixels → tensor → logits, wherever images are preprocessed.

    this package    encoded image → pixels → tensor; also checked whenever a bundle is opened
    graph           pixels → tensor, inside ``model.onnx`` if the graph normalises
    server          encoded image → pixels or tensor in the preprocessing model; encoded image → logits in the ensemble

The results for the golden images must equal the results that were recorded at export. If a result differs, the check
tries the usual mistakes, and names the mistake that gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.golden import GoldenSet, preprocessing_problem
from gmmvit_deploy.errors import ImageError, NotOfferedError
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.preprocess import RESAMPLING, UnusableImage, fitted
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity._verdict import Check, skipped_check
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.runtimes.programs.onnxruntime import normalised_in_graph
from gmmvit_deploy.runtimes.runners.runner import Runner, Served
from gmmvit_deploy.tolerances import Limit

__all__ = [
    "CROP_PCTS",
    "Sample",
    "bgr",
    "check_preprocessing",
    "expected_of_golden",
    "normalisations",
    "pixel_mistakes",
    "samples_of",
]

_SAMPLES = 128

NAME = "preprocessing"
_MOST_SENT = 16
_TENSOR_ROUNDING = 4 * 2.0**-23
"""Largest difference allowed between two tensors, relative to the largest value of the tensor or to 1.

Two programs may round the subtraction of the mean and the division by std differently.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A real image in the form that a client sends.

    where: a text that identifies the image.  encoded: returns the image file, such as a JPEG.
    pixels: uint8 (height, width, channels), decoded by this package.  exact: (C,), the expected logits for ``pixels``:
    PyTorch's float64 logits, or those of the runner's quantised graph.
    """

    where: str
    encoded: Callable[[], bytes]
    pixels: NDArray[Any]
    exact: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Fit:
    """A way to fit an image to the network's size, as in `preprocess.fitted`; black: the padding is black."""

    name: str
    crop_pct: float
    black: bool = False

    def __str__(self) -> str:
        if self.name == "stretch":
            return self.name
        return f"{self.name} with crop_pct {self.crop_pct:g}{', padded with black' if self.black else ''}"


CROP_PCTS = (1.0, 0.875, 0.9, 0.95)
"""The values of crop_pct that most of timm's models use."""
_FITS = (
    _Fit("stretch", 1.0),
    *(_Fit(name, crop_pct) for name in ("center", "squash", "border") for crop_pct in CROP_PCTS),
    *(_Fit("border", crop_pct, black=True) for crop_pct in CROP_PCTS),
)
"""The ways to try when pixels differ, in addition to each way with the crop_pct of the bundle."""


def check_preprocessing(
    bundle: Bundle,
    runner: Runner,
    limit: Limit,
    *,
    samples: Sequence[Sample] = (),
    of_graph: QuantisedGraph | None = None,
    checked: dict[Path, list[str]] | None = None,
) -> Check:
    """Check preprocessing in this package, in the runner's graph and on the runner's server.

    limit: the limit for the distance of the runner's logits.  samples: real images to send to the server.
    of_graph: the runner's quantised graph, whose logits the server must give; None expects PyTorch's logits.
    checked: path of a graph → problems with its normalisation. A graph in it is not run again, and the graph of the
    runner is added: runners of the same graph share the dict.
    Errors: every error that the server's client raises.
    """
    spec = bundle.manifest.image
    if spec.normalisation is None:
        return skipped_check(NAME, "the bundle has no mean and std, so images cannot be turned into inputs")
    golden = bundle.golden_set()
    seen = [f"{len(golden.images)} reference images decode here as at export"]
    reasons, unknown = [], []
    if problem := preprocessing_problem(golden, spec):
        reasons.append(f"here: {problem}")
    if bundle.manifest.input_kind == "pixels" and runner.graph is not None:
        seen.append("the graph normalises with the manifest's mean and std")
        checked, path = {} if checked is None else checked, runner.graph.path
        if path not in checked:
            checked[path] = _graph_problems(path, golden, spec)
        reasons += checked[path]
    if runner.server is not None:
        samples = _with_logits(bundle, samples[:_MOST_SENT], of_graph)
        whose = "PyTorch's" if of_graph is None else "the quantised graph's"
        try:
            reasons += _preprocess_problems(runner.server, bundle, golden, spec, runner.max_batch)
            likewise = "preprocesses them likewise and "
        except NotOfferedError as exc:  # a gateway may offer the ensemble only
            unknown.append(f"the pixels of the server were not compared: {exc}")
            likewise = ""
        seen.append(f"the server {likewise}gives {whose} logits for {len(samples)} images of the data")
        expected = expected_of_golden(bundle, of_graph)
        reasons += _ensemble_problems(runner.server, golden, expected, whose, limit, runner.max_batch)
        reasons += _sample_problems(runner.server, samples, whose, limit)
    return Check(
        name=NAME,
        verdict="failed" if reasons else "undecided" if unknown else "passed",
        summary="; ".join(seen) if not reasons else f"{len(reasons)} differences from the preprocessing at export",
        reasons=tuple(reasons + unknown),
        details={"images": len(golden.images)},
    )


def bgr(channels: int) -> list[int] | None:
    """Return the channel order with red and blue exchanged; None for fewer than 3 channels."""
    return [2, 1, 0, *range(3, channels)] if channels >= 3 else None


def normalisations(spec: ImageSpec) -> Iterator[tuple[str, ImageSpec]]:
    """Yield (description, spec with another mean and std) for normalisations that are often used by mistake."""
    known = {
        f"the mean and std of {name}": (data.mean, data.std)
        for name, data in DATASETS.items()
        if len(data.mean) == spec.channels
    }
    if spec.channels == 3:
        known["the mean and std of ImageNet"] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        known["the mean and std of CLIP"] = (
            (0.48145466, 0.4578275, 0.40821073),
            (0.26862954, 0.26130258, 0.27577711),
        )
    if spec.channels == 1:
        known["the mean and std of MNIST's training images"] = (0.1307,), (0.3081,)
    known[f"mean and std {', '.join(['0.5'] * spec.channels)}"] = (0.5,) * spec.channels, (0.5,) * spec.channels
    known["mean 0 and std 1 (values in [0, 1])"] = (0.0,) * spec.channels, (1.0,) * spec.channels
    for name, (mean, std) in known.items():
        if (mean, std) != spec.normalisation:
            yield f"normalised with {name}", replace(spec, mean=mean, std=std)


def _graph_problems(path: Path, golden: GoldenSet, spec: ImageSpec) -> list[str]:
    pixels = np.concatenate([golden.inputs, golden.image_pixels])
    tensor = normalised_in_graph(path, pixels)
    if tensor is None:
        return [f"{path.name}: expected a graph that normalises pixels, got a graph without this step"]
    return [f"{path.name}: {why}" for why in _tensor_problem(tensor, pixels, spec)]


def _preprocess_problems(
    server: Served, bundle: Bundle, golden: GoldenSet, spec: ImageSpec, max_batch: int
) -> list[str]:
    """Errors: NotOfferedError when a gateway does not offer the preprocessing model."""
    served = server.connection.model(server.preprocess)
    expected = spec.to_json()
    stated = {name: (served.preprocessing or {}).get(name) for name in expected}
    where = f"{server.preprocess} on the server"
    reasons = [
        f"{where}: expected {name} {expected[name]} as in the bundle, got {stated[name]}"
        for name in expected
        if stated[name] != expected[name]
    ]
    kind = bundle.manifest.input_kind
    made = np.concatenate(
        [
            server.connection.infer(server.preprocess, "IMAGE", part, output=kind)
            for part in _encoded(golden, min(served.max_batch, max_batch))
        ]
    )
    if kind == "pixels":
        return reasons + [f"{where}: {why}" for why in _pixel_problem(made, golden, spec)]
    return reasons + [f"{where}: {why}" for why in _tensor_problem(made, golden.image_pixels, spec)]


def expected_of_golden(bundle: Bundle, of_graph: QuantisedGraph | None) -> NDArray[Any]:
    """Return the logits of the golden images: those of the quantised graph, or those that PyTorch gave at export."""
    golden = bundle.golden_set()
    return golden.image_logits if of_graph is None else of_graph.logits(bundle.inputs_from_pixels(golden.image_pixels))


def _with_logits(bundle: Bundle, samples: Sequence[Sample], of_graph: QuantisedGraph | None) -> Sequence[Sample]:
    if of_graph is None or not samples:
        return samples
    logits = of_graph.logits(bundle.inputs_from_pixels(np.stack([sample.pixels for sample in samples])))
    return [replace(sample, exact=row) for sample, row in zip(samples, logits, strict=True)]


def _ensemble_problems(
    server: Served, golden: GoldenSet, expected: NDArray[Any], whose: str, limit: Limit, max_batch: int
) -> list[str]:
    size = min(server.connection.model(server.ensemble).max_batch, max_batch)
    logits = np.concatenate([server.infer(part) for part in _encoded(golden, size)])
    largest = distance(logits, expected)
    if largest <= 2 * limit.largest:  # twice, because the golden logits are rounded too
        return []
    return [
        f"{server.ensemble} on the server: the logits of encoded reference images differ by {largest:.3g} from "
        f"{whose}; expected at most {2 * limit.largest:.3g}"
    ]


def _encoded(golden: GoldenSet, size: int) -> Iterator[NDArray[Any]]:
    """Yield the encoded golden images in batches of ``size``."""
    images = np.array([[image] for image in golden.images], dtype=np.object_)
    return (images[start : start + max(1, size)] for start in range(0, len(images), max(1, size)))


def _sample_problems(server: Served, samples: Sequence[Sample], whose: str, limit: Limit) -> list[str]:
    """Send each sample in a separate request.  Unlike the golden images, samples may be JPEGs of any size."""
    reasons = []
    for sample in samples:
        try:
            encoded = sample.encoded()
        except ImageError as exc:  # the server refuses what can be decoded here, such as a large TIFF file
            reasons.append(str(exc))
            continue
        largest = distance(server.infer(np.array([[encoded]], dtype=np.object_))[0], sample.exact)
        if not largest <= limit.largest:
            reasons.append(
                f"{sample.where}: the server's logits for the file differ by {largest:.3g} from {whose} logits for "
                f"the pixels decoded here; expected at most {limit.largest:.3g}"
            )
    return reasons[:1] + ([f"and {len(reasons) - 1} more of {len(samples)} images"] if len(reasons) > 1 else [])


def _pixel_problem(pixels: NDArray[Any], golden: GoldenSet, spec: ImageSpec) -> list[str]:
    expected = golden.image_pixels
    if pixels.shape == expected.shape and np.array_equal(pixels, expected):
        return []
    if pixels.shape != expected.shape:
        return [f"expected pixels {expected.shape}, got {pixels.shape}"]
    apart = np.abs(pixels.astype(int) - expected)
    what = f"{np.count_nonzero(apart)} pixel values differ, by up to {apart.max()}"
    return [f"{what}{_named(name for name, made in pixel_mistakes(golden, spec) if np.array_equal(made, pixels))}"]


def pixel_mistakes(golden: GoldenSet, spec: ImageSpec) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (description of the mistake, pixels of the golden images with the mistake) for each usual mistake.

    Mistakes in the filter alone come first, then mistakes in the fit alone, then mistakes in both.
    """
    import io

    from PIL import Image

    if (colours := bgr(spec.channels)) is not None:
        yield "channels in the order BGR", golden.image_pixels[..., colours]
    fit, name = RESAMPLING[spec.resize]
    own_filter, own_fit = Image.Resampling[name], _Fit(fit, 1.0 if fit == "stretch" else spec.crop_pct)
    decoded = [Image.open(io.BytesIO(image)).convert(spec.mode) for image in golden.images]
    other_filters = [resampling for resampling in Image.Resampling if resampling is not own_filter]
    same_crop = (replace(other, crop_pct=spec.crop_pct) for other in _FITS if other.name != "stretch")
    other_fits = [other for other in dict.fromkeys((*same_crop, *_FITS)) if other != own_fit]
    mistakes = [
        *((resampling, own_fit) for resampling in other_filters),
        *((own_filter, other) for other in other_fits),
        *((resampling, other) for other in other_fits for resampling in other_filters),
    ]
    for resampling, other in mistakes:
        made = _all_fitted(decoded, spec, other, resampling)
        if made is None:
            continue
        differences = []
        if resampling is not own_filter:
            differences.append(f"resized with {resampling.name.lower()} instead of {own_filter.name.lower()}")
        if other != own_fit:
            differences.append(f"fitted by {other} instead of {own_fit}")
        yield ", ".join(differences), made.reshape(golden.image_pixels.shape)


def _all_fitted(decoded: Sequence[Any], spec: ImageSpec, fit: _Fit, resampling: Any) -> NDArray[Any] | None:
    """Fit decoded images to the network's size; return None if the fit cannot resize an image."""
    target: dict[str, Any] = {"height": spec.height, "width": spec.width, "fit": fit.name, "crop_pct": fit.crop_pct}
    mean = (0.0,) * spec.channels if fit.black else spec.mean
    try:
        pixels = [fitted(image, **target, resampling=resampling, mean=mean) for image in decoded]
    except UnusableImage:
        return None
    stacked: NDArray[Any] = np.stack([np.asarray(image) for image in pixels])
    return stacked


def _tensor_problem(tensor: NDArray[Any], pixels: NDArray[Any], spec: ImageSpec) -> list[str]:
    expected = spec.tensor_from_pixels(pixels)
    if _same_tensor(tensor, expected):
        return []
    if tensor.shape != expected.shape:
        return [f"expected a tensor {expected.shape}, got {tensor.shape}"]
    what = f"the normalised tensor differs by up to {np.abs(tensor - expected).max():.3g}"
    return [f"{what}{_named(name for name, made in _other_tensors(pixels, spec) if _same_tensor(tensor, made))}"]


def _other_tensors(pixels: NDArray[Any], spec: ImageSpec) -> Iterator[tuple[str, NDArray[Any]]]:
    if (colours := bgr(spec.channels)) is not None:
        yield "channels in the order BGR", spec.tensor_from_pixels(pixels[..., colours])
    for name, other in normalisations(spec):
        yield name, other.tensor_from_pixels(pixels)


def _same_tensor(tensor: NDArray[Any], expected: NDArray[Any]) -> bool:
    return tensor.shape == expected.shape and bool(
        np.abs(tensor - expected).max() <= _TENSOR_ROUNDING * max(1.0, float(np.abs(expected).max()))
    )


def _named(candidates: Iterator[str]) -> str:
    name = next(candidates, "")
    return f": this mistake gives the same values: {name}" if name else ""


def samples_of(bundle: Bundle, reference: Reference, stream: ImageStream) -> list[Sample]:
    """Return up to `_SAMPLES` images of the data in the form that a client sends, with PyTorch's float64 logits."""
    usable = stream.usable()
    chosen = usable[:: max(1, len(usable) // _SAMPLES)][:_SAMPLES]
    pixels = np.stack([stream.images.pixels(index, bundle.manifest.image) for index in chosen])
    _, exact = reference.logits(bundle.inputs_from_pixels(pixels))
    return [
        Sample(where=stream.images.where(index), encoded=partial(stream.images.encoded, index), pixels=image, exact=row)
        for index, image, row in zip(chosen, pixels, exact, strict=True)
    ]
