"""Compare what a new server answers: with the golden logits of its bundle, and with the labels of the old server.

golden      every golden input to the network, and every golden image to the ensemble; limits of `tolerances`
agreement   share of images to which both servers give the same most likely label
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import recorded_errors
from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.tolerances import limit_from_stored

__all__ = ["Agreement", "label_agreement", "require_golden_answers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often two servers give the same label.

    images: the number of compared images.  differing: the images with different labels, as ``FILE: OLD → NEW``.
    """

    images: int
    differing: tuple[str, ...]

    @property
    def share(self) -> float:
        return 1 - len(self.differing) / self.images


def require_golden_answers(bundle: Bundle, grpc_url: str, go_on: Callable[[], None]) -> str:
    """Ask a server for the logits of every golden input and image of its bundle.

    Returns a sentence with the largest difference and its limit.
    go_on: called before each request; an error of it ends the comparison.
    Errors:
        ServerError: the logits differ by more than the limit, or the server does not answer.
        BundleError: the server serves another bundle.
    """
    import numpy as np

    golden = bundle.golden_set()
    with ExitStack() as opened:
        runner = opened.enter_context(closing(TritonRunner(bundle, grpc_url)))
        errors = recorded_errors(bundle, runner.precision, for_cpu=runner.device == "cpu")
        recorded = errors["largest_abs"] if errors else None
        limit = limit_from_stored(bundle.stored_noise(golden.logits), runner.precision, recorded=recorded)
        answers = []
        for row in range(len(golden.inputs)):
            go_on()
            answers.append(("golden inputs", runner.run(golden.inputs[row : row + 1])[0], golden.logits[row], row))
        if golden.images:
            classifier = opened.enter_context(closing(TritonClassifier(grpc_url)))
            for row, data in enumerate(golden.images):
                go_on()
                answers.append(("golden images", classifier.logits([data])[0], golden.image_logits[row], row))
    largest = 0.0
    for kind, logits, expected, row in answers:
        off = float(np.abs(np.asarray(logits, np.float64) - expected).max())
        if not off <= limit.largest:
            raise ServerError(
                f"{bundle.path}: the new server's logits of {kind} row {row} differ by {off:.3g} from PyTorch's "
                f"logits, expected at most {limit.largest:.3g}",
                hint=f"type gmmvit parity {bundle.path} to compare each runner of this machine with PyTorch",
            )
        largest = max(largest, off)
    return f"{len(answers)} golden answers, largest difference {largest:.2g} of {limit.largest:.2g} allowed"


def label_agreement(files: Sequence[Path], old_url: str, new_url: str, go_on: Callable[[], None]) -> Agreement:
    """Classify each file with both servers.

    go_on: called after each batch; an error of it ends the comparison.
    Errors:
        InputError: an image cannot be classified, or there are no images.
        ServerError: a server does not answer.
    """
    if not files:
        raise InputError("--images: expected images, the folder has none")
    answered = []
    for url in (old_url, new_url):
        with TritonClassifier(url) as classifier:
            results = classify_files(classifier, files, top=1, on_progress=lambda progress: go_on())
        for result in results:
            if result.error:
                raise InputError(f"{result.path}: {result.error}", hint="remove this file from the folder of --images")
        answered.append([", ".join(classifier.label_set.decided(result.predictions)) for result in results])
    pairs = zip(files, *answered, strict=True)
    return Agreement(
        images=len(files),
        differing=tuple(f"{file}: {before} → {after}" for file, before, after in pairs if before != after),
    )
