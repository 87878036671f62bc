"""Classify an encoded image: labels, the pixels that the network sees, the time of each step, agreement of programs.

bytes → decode and resize → pixels → normalise → tensor → network → logits → softmax → probabilities

A program agrees with PyTorch on an image if two conditions are met. First, the difference of each of the program's
logits from PyTorch's float64 logit is within the limit. Second, the program predicts the same class as PyTorch, or a
class so close that differences within the limit can exchange the two classes.

The limit is computed from the float32 noise (`tolerances`) of the image or of the golden inputs, which are recorded at
export. The larger noise is used, because the noise of a single image can be very small by chance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gmmvit_deploy.bench.waterfall import Step, server_parts, timings_of
from gmmvit_deploy.bundle.variants import recorded_errors
from gmmvit_deploy.errors import GmmvitError, ImageError, InputError
from gmmvit_deploy.images.labels import LabelSet, Prediction, distinct_names
from gmmvit_deploy.images.preprocess import UnusableImage
from gmmvit_deploy.images.resize_rules import STATE_PREPROCESSING
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.reports.pictures.attention_of_image import ImageAttention, attention_of_image
from gmmvit_deploy.reports.pictures.attention_weights import attention_record
from gmmvit_deploy.reports.pictures.drawings import drawings_of
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of
from gmmvit_deploy.runtimes.programs.access import NO_ACCESS, Access, parse_url
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL
from gmmvit_deploy.runtimes.runners.open import fastest_runner, open_runner
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.tolerances import Noise, limit_from_noise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["TOP", "Agreement", "Answer", "Trial"]

TOP = 5
"""Number of classes that an answer lists."""
_REPEATS = 5
_SERVER_TIMEOUT_S = 10.0  # a server that hangs must not block the page's worker thread for longer
_LONGEST_MS = 300  # after this time a step is not repeated: decoding an image of 50 million pixels takes a second
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The comparison of a program with PyTorch on an image.

    verdict: the class that the program predicts, or the labels of a multi-label network, with probabilities.
    distance: the largest distance of the program's logits from PyTorch's float64 logits; NaN if the logits cannot be
    compared.
    limit: the largest allowed distance.  derivation: the computation of the limit, in words and numbers.
    same_class: True if the program and PyTorch predict the same class.
    close: True if the program and PyTorch predict different classes, which differences within the limit can exchange.
    """

    program: str
    verdict: str
    distance: float
    limit: float
    derivation: str
    same_class: bool
    close: bool

    @property
    def agrees(self) -> bool:
        return self.distance <= self.limit and (self.same_class or self.close)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The result for an image.

    predictions: the predicted classes, likeliest first.  verdict: as in `Agreement`.
    pixels: uint8 (height, width, channels), after decoding and resizing.
    steps: the time of each step, as in the waterfall of ``gmmvit bench``.
    attention: the mean attention distances, and the attention rollout if the rollout is defined.
    agreements: the agreement of the local program, then the agreements of the server's programs.
    server_error: the reason why the server gave no answer, with a hint; empty if the server answered or is not used.
    other_bundle: a description of the mismatch if the server serves another bundle; otherwise empty.
    """

    predictions: tuple[Prediction, ...]
    verdict: str
    pixels: NDArray[Any]
    steps: tuple[Step, ...]
    agreements: tuple[Agreement, ...]
    attention: ImageAttention
    server_error: str = ""
    other_bundle: str = ""


class Trial:
    """A bundle in this process, with the bundle's PyTorch reference, and a server if a URL is given.

    Use `Trial` as a context manager.

    masks: the masks of every attention layer with masks.  windows: name of an attention layer → windows of the layer.
    drawings: the other steps on the attention scores, the filters of the patch embedding, and the position embeddings.
    notice: the reason why a faster runner is not used; empty if none is faster, or a runner was requested.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        url: str | None = None,
        model: str = DEFAULT_MODEL,
        access: Access = NO_ACCESS,
        runner: str | None = None,
    ) -> None:
        """Load the bundle.

        url: the URL of a Triton server, which may start later.  model: the name of the server's ensemble.
        access: the key and the trusted certificates for the server.
        runner: the name of a runner, which computes in float32; None takes the usual one.
        Errors:
            InputError: the bundle has no mean and std or no logits, or the URL is not valid.
            BundleError: the weights or the graph of the bundle cannot be loaded.
        """
        manifest = bundle.manifest
        if manifest.image.normalisation is None:
            raise InputError(
                f"{bundle.path}: the bundle has no mean and std, without which the page cannot classify an image",
                hint=STATE_PREPROCESSING,
            )
        if not manifest.has_logits:
            raise InputError(
                f"{bundle.path}: the bundle has only features, and the page shows the classes of images",
                hint="type gmmvit export CHECKPOINT -o BUNDLE --outputs both to export logits and features",
            )
        self.bundle, self.url, self.model, self._access = bundle, url, model, access
        if url is not None:
            parse_url(url)
        names = distinct_names(manifest.labels)
        self._labels = LabelSet(labels=names, task=manifest.task, thresholds=manifest.thresholds)
        self.reference = Reference(bundle)
        self.masks = masks_of(self.reference.model)
        self.drawings = drawings_of(self.reference.model)
        self._grids = self.reference.model.observed_grids()
        self.windows = family_of(manifest.spec).windows(manifest.spec)
        # In float32, because the logits are compared with PyTorch's within its float32 noise.
        name, self.notice = (runner, "") if runner is not None else fastest_runner(bundle)
        self.runner = open_runner(name, bundle)
        self.runner.judged = True  # the page shows how far each answer is from PyTorch's
        self.examples = bundle.golden_set().images
        self._server: TritonRunner | None = None

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the local program and close the connection to the server."""
        self.runner.close()
        self._forget_server()

    def answer(self, data: bytes) -> Answer:
        """Classify an encoded image.

        Errors: ImageError when the image cannot be decoded.
        Every error of the local runner.
        """
        image = self.bundle.manifest.image
        try:
            pixels, decode_ms = _timed(lambda: image.pixels_from_bytes(data))
        except UnusableImage as exc:
            raise ImageError(f"the image cannot be used: {exc}") from exc
        inputs, input_ms = _timed(lambda: self.bundle.inputs_from_pixels(pixels[None]))
        logits, network_ms = _timed(lambda: self.runner.run(inputs))
        times: list[tuple[str, float, dict[str, float]]] = [("decode and resize", decode_ms, {})]
        if self.bundle.manifest.input_kind == "tensor":
            times.append(("normalise", input_ms, {}))
        times.append((self.runner.label, network_ms, {}))

        exact, noise = self._reference_logits(inputs)
        agreements = [self._agreement(self.runner.label, logits, exact, noise, self.runner)]
        server_error = other_bundle = ""
        if self.url is not None:
            try:
                server = self._connected(self.url)
                other_bundle = server.server.other_bundle
                for program, rows, ms, parts in _asked(server, inputs, data):
                    times.append((program, ms, parts))
                    agreements.append(self._agreement(program, rows, exact, noise, server))
            except GmmvitError as exc:
                # Close the connection, so that the next image opens a new connection: the server may run again then.
                self._forget_server()
                server_error = f"{exc} ({exc.hint})"
        return Answer(
            predictions=self._labels.predictions(logits[0], TOP),
            verdict=verdict_of(self._labels, logits[0]),
            pixels=pixels,
            steps=_steps(times),
            agreements=tuple(agreements),
            attention=self._attention(inputs),
            server_error=server_error,
            other_bundle=other_bundle,
        )

    def _attention(self, inputs: NDArray[Any]) -> ImageAttention:
        """Run PyTorch in float64 again, with gradients, which show the tokens that the head reads."""
        model, image = self.reference.exact, self.bundle.manifest.image
        record = attention_record(model, self.reference.tensors(inputs).double())
        return attention_of_image(
            model,
            record,
            observed=self._grids,
            size=(image.height, image.width),
            labels=self.bundle.manifest.labels,
        )

    def _reference_logits(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], Noise]:
        trained, exact = self.reference.logits(inputs)
        measure = ErrorMeasure()
        measure.add(trained, exact)
        noise = measure.noise()
        largest = max(noise.largest, self.bundle.manifest.float32_noise)
        return exact, Noise(largest=largest, rms=noise.rms, scale=noise.scale)

    def _agreement(
        self, program: str, logits: NDArray[Any], exact: NDArray[Any], noise: Noise, runner: Runner
    ) -> Agreement:
        recorded = recorded_errors(self.bundle, runner.precision, for_cpu=runner.device == "cpu")
        limit = limit_from_noise(noise, runner.precision, recorded=recorded["largest_abs"] if recorded else None)
        same, margin = _compared(self._labels, logits[0], exact[0])
        # Two logits can exchange their order; a threshold is exact.
        noise_margin = limit.largest if self._labels.task == "multi-label" else 2 * limit.largest
        return Agreement(
            program=program,
            verdict=verdict_of(self._labels, logits[0]),
            distance=distance(logits, exact),
            limit=limit.largest,
            derivation=limit.derivation,
            same_class=same,
            close=not same and margin <= noise_margin,
        )

    def _connected(self, url: str) -> TritonRunner:
        if self._server is None:
            self._server = TritonRunner(
                self.bundle,
                url,
                model=self.model,
                access=self._access,
                takes_other_bundle=True,
                timeout_s=_SERVER_TIMEOUT_S,
            )
        return self._server

    def _forget_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


def verdict_of(label_set: LabelSet, logits: NDArray[Any]) -> str:
    """Return the class with its probability, or the labels that reach their thresholds, of a row of logits (C,)."""
    if not np.isfinite(logits).all():
        return "logits that are not finite"
    guesses = label_set.predictions(logits, 1)
    shown = [f"{guess.label}, {guess.probability:.1%}" for guess in guesses if guess.present]
    return "; ".join(shown) or "no label reaches its threshold"


def _compared(label_set: LabelSet, logits: NDArray[Any], exact: NDArray[Any]) -> tuple[bool, float]:
    """Return (whether both rows of logits (C,) give the same class or labels, the largest margin that was crossed)."""
    if logits.shape != exact.shape:
        return False, np.inf
    if label_set.task == "multi-label":
        thresholds = np.array(label_set.threshold_logits)
        crossed = (logits >= thresholds) != (exact >= thresholds)
        return not crossed.any(), float(np.abs(exact - thresholds)[crossed].max(initial=0.0))
    expected, actual = int(exact.argmax()), int(logits.argmax())
    return actual == expected, float(exact[expected] - exact[actual])


def _asked(
    runner: TritonRunner, inputs: NDArray[Any], data: bytes
) -> Iterator[tuple[str, NDArray[Any], float, dict[str, float]]]:
    """Yield (program, logits, median ms, parts of the time) for the server's network and for the server's ensemble."""
    server = runner.server
    encoded = np.array([[data]], dtype=np.object_)
    requests: tuple[tuple[str, tuple[str, ...], Callable[[], NDArray[Any]]], ...] = (
        (runner.label, (server.network,), lambda: runner.run(inputs)),
        (
            f"{runner.label} + decoding",
            (server.preprocess, server.network),
            lambda: server.infer(encoded),
        ),
    )
    for program, models, request in requests:
        request()  # not measured: opens the connection and warms up the server
        before = timings_of(server, models)
        logits, times_ms = _repeated(request)
        after = timings_of(server, models)
        parts = server_parts(models, before, after)
        # The server reports mean times, so the unexplained rest is computed from the mean of the measured times.
        unexplained = max(0.0, float(np.mean(times_ms)) - sum(parts.values()))
        yield program, logits, float(np.median(times_ms)), {**parts, "unexplained": unexplained}


def _timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """Call ``work`` repeatedly; return (result, median time in ms)."""
    result, times_ms = _repeated(work)
    return result, float(np.median(times_ms))


def _repeated(work: Callable[[], _Result]) -> tuple[_Result, list[float]]:
    """Call ``work`` up to 5 times, until the calls took more than 300 ms; return (result, ms of each call)."""
    times_ms: list[float] = []
    while True:
        start = time.perf_counter()
        result = work()
        times_ms.append((time.perf_counter() - start) * 1e3)
        if len(times_ms) >= _REPEATS or sum(times_ms) > _LONGEST_MS:
            return result, times_ms


def _steps(times: list[tuple[str, float, dict[str, float]]]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for name, ms, parts in times:
        steps.append(Step(name=name, ms=ms, over_before=ms - steps[-1].ms if steps else 0.0, parts=parts))
    return tuple(steps)
