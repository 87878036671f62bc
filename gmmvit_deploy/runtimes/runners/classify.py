"""Classify image files with a running server, or with a bundle in this process: labels with probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.arguments import require_counts
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import ImageError, InputError, RequestRejectedError, ServerError
from gmmvit_deploy.files.writing import new_file
from gmmvit_deploy.images.data.other_formats import as_served, pixels_of_file
from gmmvit_deploy.images.resize_rules import STATE_PREPROCESSING
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.labels import LabelSet, Prediction
from gmmvit_deploy.inference.preprocess import MAX_IMAGE_BYTES, UnusableImage
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.programs.access import NO_ACCESS, Access
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL, TritonConnection, with_retries
from gmmvit_deploy.runtimes.runners.chosen import ChosenRunner, choose_runner
from gmmvit_deploy.runtimes.runners.names import IN_PROCESS, runner_from
from gmmvit_deploy.runtimes.runners.open import open_runner

if TYPE_CHECKING:
    from numpy.typing import NDArray


DEFAULT_RETRY_S = 30.0
"""The time in seconds in which a request that an overloaded server refused may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The result for a file: predictions in order of decreasing probability, or an error.

    runner: the runner that computed the predictions, such as ``openvino+kernels``.
    bundle: the SHA-256 of the bundle; "" if a server states none.
    features: the features (D,), if they were asked for.
    error: the reason why the file has no answer; empty if there is an answer.
    notice: the reason why the fastest runner is not used; empty if it is used.
    deferred: whether float32 computed the image again; None if the runner is no cascade.
    """

    path: Path
    runner: str
    predictions: tuple[Prediction, ...] = ()
    error: str = ""
    notice: str = ""
    bundle: str = ""
    features: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    deferred: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields except the features as JSON values, ``deferred`` for a cascade only."""
        deferred = {} if self.deferred is None else {DEFERRED: self.deferred}
        return {
            "path": self.path,
            "runner": self.runner,
            "bundle": self.bundle,
            "predictions": [prediction.to_json() for prediction in self.predictions],
            **deferred,
            "error": self.error,
            "notice": self.notice,
        }


class Classifier:
    """Computes logits of encoded images.  Abstract; used as a context manager.

    runner: as in `Classification`; ``triton-grpc`` or ``triton-http`` if a server does not state its runner.
    bundle, notice: as in `Classification`.  max_batch: maximum number of images in a call of `logits`.
    source: the bundle, or the model on the server, for messages.
    cascade: whether the runner is a cascade, which also answers with ``deferred`` (B, 1).
    """

    runner: str
    bundle: str = ""
    notice: str = ""
    label_set: LabelSet
    max_batch: int
    outputs: tuple[str, ...]
    source: str
    cascade = False

    def logits(self, images: Sequence[bytes]) -> NDArray[Any]:
        """Compute the float32 logits (B, C) of B encoded images for C classes.

        A network without logits gives its features (B, D).
        Errors: RequestRejectedError or ImageError when any of the images cannot be decoded.
        """
        return self.answers(images, self.outputs[:1])[self.outputs[0]]

    def answers(self, images: Sequence[bytes], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Compute the named outputs of B encoded images: name of the output → float32 (B, …).  Errors: as `logits`."""
        raise NotImplementedError

    def require_outputs(self, *, logits: bool, features: bool) -> None:
        """Check that the network has the outputs that are asked for.

        Errors: InputError that names the source, its outputs, and the command that exports the other output.
        """
        for name, asked in (("logits", logits), ("features", features)):
            if asked and name not in self.outputs:
                raise InputError(
                    f"{self.source}: expected a network with {name}, but its only output is {', '.join(self.outputs)}",
                    hint="type gmmvit export CHECKPOINT -o BUNDLE --outputs both to export logits and features"
                    + ("" if features else ", or add --features FILE.npz to write the features"),
                )

    def close(self) -> None:
        """Release the classifier's resources."""

    def __enter__(self) -> Classifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TritonClassifier(Classifier):
    """Classifies with a Triton server.  The server's ensemble decodes the images and runs the network.

    A request that an overloaded server refuses is repeated after random waits (`with_retries`).
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = DEFAULT_MODEL,
        access: Access = NO_ACCESS,
        retry_s: float = DEFAULT_RETRY_S,
    ) -> None:
        """Connect to a server.

        model: name of the ensemble.  retry_s: as ``deadline_s`` of `with_retries`.
        Errors: ServerError when the server does not answer, or has no ensemble ``model`` that takes encoded images.
        OverloadError when the server still refuses a request after ``retry_s``. KeyRefusedError and NotOfferedError.
        """
        self._model, self._retry_s = model, retry_s
        self._connection = TritonConnection(url, access=access)
        self.runner = f"triton-{self._connection.protocol}"
        try:
            served = with_retries(lambda: self._connection.model(model), deadline_s=retry_s)
        except ServerError:
            self._connection.close()
            raise
        if "IMAGE" not in served.inputs:
            self._connection.close()
            raise ServerError(
                f"{model} at {url}: expected a model with encoded images as its input IMAGE, got the inputs "
                f"{', '.join(served.inputs)}",
                hint="type --served-name NAME with the name of the ensemble; "
                "the command gmmvit repository prints the names of the models that it writes",
            )
        self.label_set, self.max_batch, self.outputs = served.label_set, served.max_batch, served.outputs
        self.runner, self.bundle = served.runner or self.runner, served.bundle_sha256 or ""
        self.cascade = RunnerName.parse(served.runner).cascade
        self.source = f"{model} at {url}"

    def answers(self, images: Sequence[bytes], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        import numpy as np

        encoded = np.array([[data] for data in _each(images, as_served)], dtype=np.object_)
        answers = with_retries(
            lambda: self._connection.infer_all(self._model, "IMAGE", encoded, outputs=outputs),
            deadline_s=self._retry_s,
        )
        return dict(zip(outputs, answers, strict=True))

    def close(self) -> None:
        self._connection.close()


class BundleClassifier(Classifier):
    """Classifies with a bundle in this process, without a server.

    Example: ``classify_files(BundleClassifier("bundle"), ["photo.jpg"])``.
    """

    def __init__(self, bundle: Bundle | Path | str, *, runner: str | None = None) -> None:
        """Open a bundle.

        runner: ``NAME[:PRECISION]``; None takes the bundle's choice for this machine.
        Errors: those of the runner. InputError when the runner is unknown, and when the bundle has no mean and std.
        """
        bundle = open_bundle(bundle)
        if bundle.manifest.image.normalisation is None:
            raise InputError(
                f"{bundle.path}: the bundle has no mean and std, so images cannot be turned into inputs",
                hint=STATE_PREPROCESSING,
            )
        self._bundle = bundle
        self._image = bundle.manifest.image
        chosen = choose_runner(bundle) if runner is None else ChosenRunner(runner=runner_from(runner, IN_PROCESS))
        self.runner, self.notice, self.bundle = str(chosen.runner), "; ".join(chosen.notes), bundle.sha256
        self.cascade = chosen.runner.cascade
        self._runner = open_runner(chosen.runner, bundle)
        self.label_set, self.max_batch = bundle.manifest.label_set, bundle.manifest.max_batch
        self.outputs, self.source = bundle.manifest.output_names, str(bundle.path)

    def answers(self, images: Sequence[bytes], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        import numpy as np

        decoded = _each(images, lambda data: pixels_of_file(data, self._image))
        inputs = self._bundle.inputs_from_pixels(np.stack(decoded))
        if tuple(outputs) == self.outputs[:1]:  # the runtime need not compute the other output
            return {outputs[0]: self._runner.run(inputs)}
        answers = self._runner.run_all(inputs)
        return {name: rows for name, rows in answers.items() if name in outputs}


def _each(images: Sequence[bytes], prepare: Callable[[bytes], Any]) -> list[Any]:
    """Prepare encoded images.  Errors: ImageError that names the position of an image that cannot be used."""
    prepared = []
    for position, data in enumerate(images):
        try:
            prepared.append(prepare(data))
        except UnusableImage as exc:
            raise ImageError(f"image {position}: {exc}") from exc
    return prepared


def classify_files(
    classifier: Classifier,
    files: Path | str | Sequence[Path | str],
    *,
    top: int = 5,
    batch: int = 16,
    concurrency: int = 4,
    features: bool = False,
    on_progress: OnProgress = ignore,
) -> list[Classification]:
    """Classify files in concurrent batches; the results have the order of ``files``.

    Example: ``classify_files(BundleClassifier("bundle"), ["photo.jpg"])[0].predictions[0].label``.

    top: number of predictions per file.  batch: files in a batch.  concurrency: batches that run at once.
    features: True to also return the features. For a network without logits, there are only features.
    If a file cannot be read or decoded, or its logits are not finite, its result has an ``error``; the other files are
    classified.
    A batch that is too large for the server is sent again image by image.
    Errors: ServerError when the server fails or stops answering.
    InputError when the network has no logits and ``features`` is False, or has no features and ``features`` is True.
    """
    require_counts(top=top, batch=batch, concurrency=concurrency)
    files = [files] if isinstance(files, str | Path) else files
    paths = [Path(file) for file in files]
    classifier.require_outputs(logits=not features, features=features)
    asked = classifier.outputs if features else ("logits",)
    if classifier.cascade:
        asked = (*asked, DEFERRED)
    size = max(1, min(batch, classifier.max_batch))
    batches = (paths[start : start + size] for start in range(0, len(paths), size))
    answers: dict[Path, Classification] = {}
    notice = classifier.notice
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        for done in _bounded(
            pool, lambda group: _classify_batch(classifier, group, top, asked), batches, concurrency * 2
        ):
            answers |= {answer.path: replace(answer, notice=notice, bundle=classifier.bundle) for answer in done}
            on_progress(Progress("classify", len(answers), len(files)))
    return [answers[path] for path in paths]


def _bounded(
    pool: ThreadPoolExecutor,
    work: Callable[[Sequence[Path]], list[Classification]],
    groups: Iterator[Sequence[Path]],
    limit: int,
) -> Iterator[list[Classification]]:
    """Yield results as they come.  ``limit`` groups wait at a time, because a folder may have millions of files."""
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


def _classify_batch(
    classifier: Classifier, files: Sequence[Path], top: int, asked: Sequence[str]
) -> list[Classification]:
    answers: dict[Path, Classification] = {}
    images: dict[Path, bytes] = {}
    for file in files:
        try:
            images[file] = _read(file)
        except ImageError as exc:
            answers[file] = Classification(path=file, runner=classifier.runner, error=str(exc))
    if images:
        answers |= _ask(classifier, images, top, asked)
    return [answers[file] for file in files]


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            raise ImageError(f"expected at most {MAX_IMAGE_BYTES} bytes, the file has {file.stat().st_size} bytes")
        data = file.read_bytes()
    except OSError as exc:
        raise ImageError(f"the file cannot be read: {exc.strerror or exc}") from exc
    if not data:
        raise ImageError("the file is empty")
    return data


def _ask(
    classifier: Classifier, images: dict[Path, bytes], top: int, asked: Sequence[str]
) -> dict[Path, Classification]:
    try:
        answers = classifier.answers(list(images.values()), asked)
    except (RequestRejectedError, ImageError) as exc:
        if len(images) == 1:
            (file,) = images
            error = str(exc).partition("image 0: ")[2] or str(exc)
            return {file: Classification(path=file, runner=classifier.runner, error=error)}
        # An image that cannot be decoded makes its whole batch fail. Retry with each image in a separate batch.
        alone = [_ask(classifier, {file: data}, top, asked) for file, data in images.items()]
        return {file: answer for answered in alone for file, answer in answered.items()}
    logits, features, deferred = (answers.get(name) for name in ("logits", "features", DEFERRED))
    answered = {}
    for row, file in enumerate(images):
        try:
            predictions = () if logits is None else classifier.label_set.predictions(logits[row], top)
        except ValueError as exc:
            answered[file] = Classification(path=file, runner=classifier.runner, error=str(exc))
            continue
        answered[file] = Classification(
            path=file,
            runner=classifier.runner,
            predictions=predictions,
            features=None if features is None else features[row],
            deferred=None if deferred is None else bool(deferred[row, 0]),
        )
    return answered


def write_features(path: Path, answers: Sequence[Classification], *, force: bool = False) -> None:
    """Write an .npz file that numpy, scikit-learn and vector databases read.

    Its arrays are ``features``, float32 (N, D), and ``files``, the N paths as text, in the order of ``answers``.
    Files without features, because they could not be decoded, are left out.
    force: replace an existing file.
    Errors: OutputError when the file exists and ``force`` is False, or when writing fails.
    """
    import numpy as np

    answered = [answer for answer in answers if answer.features is not None]
    rows = [answer.features for answer in answered if answer.features is not None]
    features = np.stack(rows) if rows else np.zeros((0, 0), np.float32)
    with new_file(path, force=force) as file:
        np.savez(file, features=features, files=np.array([str(answer.path) for answer in answered], dtype=np.str_))
