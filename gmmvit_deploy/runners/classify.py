"""Image files → labels with probabilities, from a live server or from a bundle in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import ImageError, InputError, RequestRejectedError, ServerError
from gmmvit_deploy.preprocess import MAX_IMAGE_BYTES, UnusableImage
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtime.onnxruntime import fused_graph
from gmmvit_deploy.runtime.triton import DEFAULT_MODEL, TritonConnection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.artifacts import Bundle

__all__ = [
    "BundleClassifier",
    "Classification",
    "Classifier",
    "Prediction",
    "TritonClassifier",
    "classify_files",
    "likeliest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One class with its softmax probability."""

    label: str
    index: int
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """What became of one file: predictions, likeliest first, or the reason why there are none.

    runner: name of what answered.  notice: as `Classifier`.
    """

    path: Path
    runner: str
    predictions: tuple[Prediction, ...] = ()
    error: str = ""
    notice: str = ""


class Classifier:
    """``logits(images)`` for encoded images.  Abstract; used as a context manager.

    runner: name of what answers.  notice: why our CPU kernels, which would be faster, are not used; empty where
    they are, or where nobody asked for them.
    """

    runner: str
    notice: str = ""
    labels: tuple[str, ...]
    max_batch: int

    def logits(self, images: Sequence[bytes]) -> NDArray[Any]:
        """float32 (B, C).  Errors: RequestRejectedError or ImageError when one of them is no image."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the classifier holds."""

    def __enter__(self) -> Classifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TritonClassifier(Classifier):
    """The ensemble of a served bundle: the server decodes, so it answers as it does for everybody."""

    def __init__(self, url: str, *, model: str = DEFAULT_MODEL) -> None:
        """Errors: ServerError when the server is not there, or has no such model that takes images."""
        self._model = model
        self._connection = TritonConnection(url)
        self.runner = f"triton-{self._connection.protocol}"
        try:
            served = self._connection.model(model)
        except ServerError:
            self._connection.close()
            raise
        if "IMAGE" not in served.inputs:
            self._connection.close()
            raise ServerError(
                f"{model} at {url} takes {', '.join(served.inputs)}, not encoded images",
                hint="name the ensemble that gmmvit repository wrote with --model",
            )
        self.labels, self.max_batch = served.labels, served.max_batch

    def logits(self, images: Sequence[bytes]) -> NDArray[Any]:
        import numpy as np

        return self._connection.infer(self._model, "IMAGE", np.array([[data] for data in images], dtype=np.object_))

    def close(self) -> None:
        self._connection.close()


class BundleClassifier(Classifier):
    """A bundle in this process, through ONNX Runtime: no server."""

    def __init__(self, bundle: Bundle, *, cpu_kernels: bool = True) -> None:
        """cpu_kernels: use ours where they can be had.

        Errors: InputError when the bundle does not say how images are normalised.
        """
        if bundle.manifest.image.normalisation is None:
            raise InputError(
                f"{bundle.path}: it does not say how images become its input",
                hint="export it with --dataset, or --mean --std --labels",
            )
        self._bundle = bundle
        self._image = bundle.manifest.image
        if cpu_kernels:
            self.notice = fused_graph(bundle.onnx_path)[1]
        self._runner = OnnxRuntimeRunner(bundle, kernels=cpu_kernels and not self.notice)
        self.runner = self._runner.name
        self.labels, self.max_batch = bundle.manifest.labels, bundle.manifest.max_batch

    def logits(self, images: Sequence[bytes]) -> NDArray[Any]:
        import numpy as np

        decoded = []
        for position, data in enumerate(images):
            try:
                decoded.append(self._image.pixels_from_bytes(data))
            except UnusableImage as exc:
                raise ImageError(f"image {position}: {exc}") from exc
        return self._runner.run(self._bundle.inputs_from_pixels(np.stack(decoded)))


def classify_files(
    classifier: Classifier,
    files: Sequence[Path],
    *,
    top: int = 5,
    batch: int = 16,
    concurrency: int = 4,
    on_progress: OnProgress = ignore,
) -> list[Classification]:
    """Classify files, in batches, several at a time; answers come in the order of ``files``.

    A file that cannot be read or is no image gets an answer with ``error`` and spoils nobody
    else's.
    Errors: ServerError when the server fails or goes away.
    """
    size = max(1, min(batch, classifier.max_batch))
    batches = (files[start : start + size] for start in range(0, len(files), size))
    answers: dict[Path, Classification] = {}
    notice = classifier.notice
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        for done in _bounded(pool, lambda group: _classify_batch(classifier, group, top), batches, concurrency * 2):
            answers |= {answer.path: replace(answer, notice=notice) for answer in done}
            on_progress(Progress("classify", len(answers), len(files)))
    return [answers[file] for file in files]


def _bounded(
    pool: ThreadPoolExecutor,
    work: Callable[[Sequence[Path]], list[Classification]],
    groups: Iterator[Sequence[Path]],
    limit: int,
) -> Iterator[list[Classification]]:
    """Results as they come, never more than ``limit`` groups in the air: a folder may hold millions."""
    running: set[Future[list[Classification]]] = {pool.submit(work, group) for group in islice(groups, limit)}
    try:
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(work, group) for group in islice(groups, len(done))}
            for future in done:
                yield future.result()
    finally:
        for future in running:
            future.cancel()


def _classify_batch(classifier: Classifier, files: Sequence[Path], top: int) -> list[Classification]:
    answers: dict[Path, Classification] = {}
    images: dict[Path, bytes] = {}
    for file in files:
        try:
            images[file] = _read(file)
        except ImageError as exc:
            answers[file] = Classification(path=file, runner=classifier.runner, error=str(exc))
    if images:
        answers |= _ask(classifier, images, top)
    return [answers[file] for file in files]


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            raise ImageError(f"it has {file.stat().st_size} bytes; at most {MAX_IMAGE_BYTES} are taken")
        data = file.read_bytes()
    except OSError as exc:
        raise ImageError(f"it cannot be read: {exc.strerror or exc}") from exc
    if not data:
        raise ImageError("it is empty")
    return data


def _ask(classifier: Classifier, images: dict[Path, bytes], top: int) -> dict[Path, Classification]:
    try:
        logits = classifier.logits(list(images.values()))
    except (RequestRejectedError, ImageError) as exc:
        if len(images) == 1:
            (file,) = images
            error = str(exc).partition("image 0: ")[2] or str(exc)
            return {file: Classification(path=file, runner=classifier.runner, error=error)}
        # One of them is bad and spoils the batch: ask for each alone, so that the others get their answer.
        alone = [_ask(classifier, {file: data}, top) for file, data in images.items()]
        return {file: answer for answers in alone for file, answer in answers.items()}
    return {
        file: Classification(path=file, runner=classifier.runner, predictions=likeliest(row, classifier.labels, top))
        for file, row in zip(images, logits, strict=True)
    }


def likeliest(logits: NDArray[Any], labels: Sequence[str], top: int) -> tuple[Prediction, ...]:
    """The ``top`` classes of one row of logits (C,), likeliest first, with their softmax probabilities."""
    import numpy as np

    # In float64: probabilities are for reading, and should add up.
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = exponentials / exponentials.sum()
    order = np.argsort(-logits, kind="stable")[:top]
    return tuple(
        Prediction(label=labels[i] if i < len(labels) else str(i), index=int(i), probability=float(probabilities[i]))
        for i in order
    )
