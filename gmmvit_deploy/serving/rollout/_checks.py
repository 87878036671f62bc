"""What a new bundle must keep: the contract with clients, the golden answers, and the labels of the user's images.

labels, input size, input type, name and meaning of the outputs, normalisation    must be equal
largest batch                                                                     must not shrink
every golden input to the network, every golden image to the ensemble             within the limits of `tolerances`
the user's images                                      the same most likely label from both servers, for a share of them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle, Manifest
from gmmvit_deploy.bundle.variants import recorded_distances
from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.tolerances import limit_from_stored

_SHOWN = 5
"""The number of images with different labels that an error lists."""


def contract_changes(old: Manifest, new: Manifest) -> tuple[str, ...]:
    """Return a sentence for each promise of ``old`` that ``new`` does not keep; empty if clients notice no change."""
    changes = list(_changed_labels(old.labels, new.labels))
    for name, before, after in (
        ("input type", old.input_kind, new.input_kind),
        ("input size", _size(old), _size(new)),
        ("task", old.task, new.task),
        ("outputs", _outputs(old), _outputs(new)),
    ):
        if before != after:
            changes.append(f"{name}: the served bundle has {before}, the new bundle has {after}")
    if old.image.normalisation is not None and new.image.normalisation is None:
        changes.append("encoded images: the served bundle takes PNG and JPEG, the new bundle has no mean and std")
    if new.max_batch < old.max_batch:
        changes.append(f"largest batch: the served bundle takes {old.max_batch}, the new bundle {new.max_batch}")
    return tuple(changes)


def require_same_contract(old: Bundle, new: Bundle) -> None:
    """Check that ``new`` keeps every promise of ``old``.  Errors: InputError that lists each change."""
    changes = contract_changes(old.manifest, new.manifest)
    if changes:
        listed = "".join(f"\n  {change}" for change in changes)
        raise InputError(
            f"{new.path}: clients of the served bundle {old.sha256[:12]} would notice a change:{listed}",
            hint="export a bundle with the same labels and input, or add --allow-contract-change if every client "
            "expects the change",
        )


def _size(manifest: Manifest) -> str:
    channels, height, width = manifest.image.tensor_shape
    return f"{height}×{width} pixels with {channels} channel{'' if channels == 1 else 's'}"


def _outputs(manifest: Manifest) -> str:
    return ", ".join(
        f"{output.name} of shape ({', '.join(map(str, output.shape))}), {output.meaning}" for output in manifest.outputs
    )


def _changed_labels(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    if old == new:
        return ()
    if len(old) != len(new):
        return (f"labels: the served bundle has {len(old)}, the new bundle has {len(new)}",)
    index = next(index for index, (before, after) in enumerate(zip(old, new, strict=True)) if before != after)
    others = sum(before != after for before, after in zip(old, new, strict=True)) - 1
    also = f", and {others} other classes differ" if others else ""
    return (f"labels: class {index} is {old[index]!r} in the served bundle and {new[index]!r} in the new bundle{also}",)


def require_golden_answers(bundle: Bundle, model: str, grpc_url: str, go_on: Callable[[], None]) -> str:
    """Compare a server's logits of every golden input and image of a bundle; return a sentence with the result.

    model: the name of the bundle's model on the server.
    go_on: called before each request; an error of it ends the comparison.
    Errors: ServerError above the limit, or without an answer. BundleError when the server serves another bundle.
    """
    import numpy as np

    golden = bundle.golden_set()
    with ExitStack() as opened:
        runner = opened.enter_context(closing(TritonRunner(bundle, grpc_url, model=model)))
        recorded = recorded_distances(bundle, runner.precision, runner.form).get("largest_abs")
        limit = limit_from_stored(bundle.stored_noise(golden.logits), runner.precision, recorded=recorded)
        answers = []
        for row in range(len(golden.inputs)):
            go_on()
            answers.append(("reference inputs", runner.run(golden.inputs[row : row + 1])[0], golden.logits[row], row))
        if golden.images:
            classifier = opened.enter_context(closing(TritonClassifier(grpc_url, model=model)))
            for row, data in enumerate(golden.images):
                go_on()
                answers.append(("reference images", classifier.logits([data])[0], golden.image_logits[row], row))
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
    return f"{len(answers)} reference outputs, largest difference {largest:.2g} of {limit.largest:.2g} allowed"


def require_same_labels(
    files: Sequence[Path], model: str, old_url: str, new_url: str, min_share: float, go_on: Callable[[], None]
) -> str:
    """Classify each file, at least one, with both servers; return a sentence with the number of equal labels.

    model: its name on both servers.
    min_share: of images with the same label from both servers.
    go_on: called after each batch; an error of it ends the comparison.
    Errors: InputError for an image that cannot be classified. ServerError below ``min_share``, or without an answer.
    """
    answered = []
    for url in (old_url, new_url):
        with TritonClassifier(url, model=model) as classifier:
            results = classify_files(classifier, files, top=1, on_progress=lambda progress: go_on())
        for result in results:
            if result.error:
                raise InputError(f"{result.path}: {result.error}", hint="remove this file from the folder of --images")
        answered.append([", ".join(classifier.label_set.decided(result.predictions)) for result in results])
    pairs = zip(files, *answered, strict=True)
    differing = [f"{file}: {before} → {after}" for file, before, after in pairs if before != after]
    same = len(files) - len(differing)
    if same / len(files) < min_share:
        shown = "".join(f"\n  {line}" for line in differing[:_SHOWN])
        if more := len(differing[_SHOWN:]):
            shown += f"\n  and {more} more"
        raise ServerError(
            f"the new server gives the same label as the old server to {same} of {len(files)} "
            f"images ({same / len(files):.1%}), expected at least {min_share:.1%} (FILE: label of the old server → "
            f"label of the new server):{shown}",
            hint="look at the images with other labels; if the new labels are right, repeat with a smaller --agreement",
        )
    return f"images: both servers give the same label to {same} of {len(files)}"
