"""Check the preprocessing contract: encoded image → pixels → tensor → logits, wherever images are preprocessed.

    this package    encoded image → pixels → tensor; also checked whenever a bundle is opened
    graph           pixels → tensor, inside ``model.onnx`` if the graph normalises
    server          encoded image → pixels or tensor in the preprocessing model; encoded image → logits in the ensemble

The results for the golden images must equal the results that were recorded at export. If a result differs, the check
tries the usual mistakes, and names the mistake that gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.golden import GoldenSet, preprocessing_problem
from gmmvit_deploy.errors import ImageError, NotOfferedError
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.parity._image_mistakes import normalised_otherwise, pixel_mistakes
from gmmvit_deploy.parity._numeric import NumericCheck
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity._runner_check import RunnerCheck
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.runtimes.programs.onnxruntime import normalised_in_graph
from gmmvit_deploy.runtimes.runners.runner import Served
from gmmvit_deploy.tolerances import Limit

_MAX_SENT = 16
"""The number of images that a server gets as files."""
_TENSOR_ROUNDING = 4 * 2.0**-23
"""The maximum difference between two tensors, relative to their largest value or to 1: two programs may round the
subtraction of the mean and the division by std differently."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A real image in the form that a client sends.

    encoded: returns the image file, such as a JPEG.  exact: (C,), the expected logits for its pixels, decoded by this
    package.
    """

    where: str
    encoded: Callable[[], bytes]
    exact: NDArray[Any]


class PreprocessingCheck(RunnerCheck):
    name = "preprocessing"

    def judge(self) -> Check:
        """Errors: every error that the server's client raises."""
        bundle, runner, of_graph = self.bundle, self.runner, self.graph
        spec = bundle.manifest.image
        if spec.normalisation is None:
            return self.not_judged("the bundle has no mean and std, so images cannot be turned into inputs")
        golden = bundle.golden_set()
        seen = [f"{len(golden.images)} reference images decode here as at export"]
        reasons, unknown = [], []
        if problem := preprocessing_problem(golden, spec):
            reasons.append(f"here: {problem}")
        if bundle.manifest.input_kind == "pixels" and runner.graph is not None:
            seen.append("the graph normalises with the manifest's mean and std")
            reasons += _graph_problems(runner.graph.path, golden, spec)
        if runner.server is not None:
            limit = self.tested.check(NumericCheck).widest_limit
            samples = self._samples()
            whose = "PyTorch's" if of_graph is None else "the quantised graph's"
            try:
                reasons += self._preprocess_problems(runner.server, golden)
                likewise = "preprocesses them likewise and "
            except NotOfferedError as exc:  # a gateway may offer the ensemble only
                unknown.append(f"the pixels of the server were not compared: {exc}")
                likewise = ""
            seen.append(f"the server {likewise}gives {whose} logits for {len(samples)} images of the data")
            reasons += self._ensemble_problems(runner.server, golden, whose, limit)
            reasons += _sample_problems(runner.server, samples, whose, limit)
        return Check(
            name=self.name,
            verdict="failed" if reasons else "undecided" if unknown else "passed",
            summary="; ".join(seen) if not reasons else f"{len(reasons)} differences from the preprocessing at export",
            reasons=tuple(reasons + unknown),
            details={"images": len(golden.images)},
        )

    def _samples(self) -> Sequence[Sample]:
        """Return real images, with the expected logits."""
        stream, reference = self.run.stream, self.run.reference
        if stream is None or reference is None:
            return ()
        chosen = stream.taken[:: max(1, len(stream.taken) // _MAX_SENT)][:_MAX_SENT]
        pixels = np.stack([stream.images.pixels(index, self.bundle.manifest.image) for index in chosen])
        inputs = self.bundle.inputs_from_pixels(pixels)
        exact = reference.logits(inputs)[1] if self.graph is None else self.graph.logits(inputs)
        return [
            Sample(where=stream.images.where(index), encoded=partial(stream.images.encoded, index), exact=row)
            for index, row in zip(chosen, exact, strict=True)
        ]

    def _preprocess_problems(self, server: Served, golden: GoldenSet) -> list[str]:
        """Errors: NotOfferedError when a gateway does not offer the preprocessing model."""
        spec, kind = self.bundle.manifest.image, self.bundle.manifest.input_kind
        served = server.connection.model(server.preprocess)
        stated, where = served.preprocessing or {}, f"{server.preprocess} on the server"
        reasons = [
            f"{where}: expected {name} {expected} as in the bundle, got {stated.get(name)}"
            for name, expected in spec.to_json().items()
            if stated.get(name) != expected
        ]
        parts = _encoded(golden, min(served.max_batch, self.runner.max_batch))
        made = np.concatenate(
            [server.connection.infer(server.preprocess, "IMAGE", part, output=kind) for part in parts]
        )
        problems = (
            _pixel_problem(made, golden, spec) if kind == "pixels" else _tensor_problem(made, golden.image_pixels, spec)
        )
        return reasons + [f"{where}: {why}" for why in problems]

    def _ensemble_problems(self, server: Served, golden: GoldenSet, whose: str, limit: Limit) -> list[str]:
        size = min(server.connection.model(server.ensemble).max_batch, self.runner.max_batch)
        logits = np.concatenate([server.infer(part) for part in _encoded(golden, size)])
        largest = distance(logits, expected_of_golden(self.bundle, self.graph))
        if largest <= 2 * limit.largest:  # twice, because the golden logits are rounded too
            return []
        return [
            f"{server.ensemble} on the server: the logits of encoded reference images differ by {largest:.3g} from "
            f"{whose}; expected at most {2 * limit.largest:.3g}"
        ]


def _graph_problems(path: Path, golden: GoldenSet, spec: ImageSpec) -> list[str]:
    pixels = np.concatenate([golden.inputs, golden.image_pixels])
    tensor = normalised_in_graph(path, pixels)
    if tensor is None:
        return [f"{path.name}: expected a graph that normalises pixels, got a graph without this step"]
    return [f"{path.name}: {why}" for why in _tensor_problem(tensor, pixels, spec)]


def expected_of_golden(bundle: Bundle, of_graph: QuantisedGraph | None) -> NDArray[Any]:
    """Return the logits of the golden images: those of the quantised graph, or those that PyTorch gave at export."""
    golden = bundle.golden_set()
    return golden.image_logits if of_graph is None else of_graph.logits(bundle.inputs_from_pixels(golden.image_pixels))


def _encoded(golden: GoldenSet, size: int) -> Iterator[NDArray[Any]]:
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


def _tensor_problem(tensor: NDArray[Any], pixels: NDArray[Any], spec: ImageSpec) -> list[str]:
    expected = spec.tensor_from_pixels(pixels)
    if _same_tensor(tensor, expected):
        return []
    if tensor.shape != expected.shape:
        return [f"expected a tensor {expected.shape}, got {tensor.shape}"]
    what = f"the normalised tensor differs by up to {np.abs(tensor - expected).max():.3g}"
    return [f"{what}{_named(name for name, made in normalised_otherwise(pixels, spec) if _same_tensor(tensor, made))}"]


def _same_tensor(tensor: NDArray[Any], expected: NDArray[Any]) -> bool:
    return tensor.shape == expected.shape and bool(
        np.abs(tensor - expected).max() <= _TENSOR_ROUNDING * max(1.0, float(np.abs(expected).max()))
    )


def _named(candidates: Iterator[str]) -> str:
    name = next(candidates, "")
    return f": this mistake gives the same values: {name}" if name else ""
