"""Run an exported graph, and compare its outputs with the golden outputs, which PyTorch computed at export.

A runner is a program that computes the outputs, such as a runtime with a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.errors import (
    BundleError,
    ExportError,
    GmmvitError,
    MissingDependencyError,
    RunnerUnavailableError,
)
from gmmvit_deploy.runtimes.programs.memory import release_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from gmmvit_deploy.models.specs import OutputName
    from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["DYNAMIC_BATCH_HINT", "proven_programs", "require_batches"]

DYNAMIC_BATCH_HINT = (
    "in the code of the model, compute the images of a batch together, without a loop over the images, and write "
    "x.shape[0] in place of len(x)"
)


class _DifferenceError(ExportError):
    """An output of a runner differs by more than the limit."""


def proven_programs(
    programs: Mapping[str, Callable[[], Runner]],
    inputs: NDArray[Any],
    expected: Mapping[OutputName, NDArray[Any]],
    limits: Mapping[OutputName, float],
    *,
    what: str,
    openvino_is_wrong: str = "",
) -> tuple[dict[str, dict[OutputName, float]], dict[str, str]]:
    """Compare the outputs of every runner that is available on this machine with the golden outputs.

    programs: name of a runner → function that opens the runner.
    inputs: the golden inputs (B, …).  expected: name of an output → its golden values (B, …).
    limits: name of an output → the largest allowed absolute difference.
    what: the file that error messages name.
    openvino_is_wrong: the reason why OpenVINO computes other logits on this CPU although the graph is right, or "".
    A runner of OpenVINO whose difference exceeds the limit is then skipped with this reason.
    Returns (name of a runner → name of an output → largest difference, name of a runner → reason why it was skipped).
    Errors: ExportError when an available runner cannot load or run the graph, when an output has another shape, or when
    a difference exceeds the limit or is NaN.
    """
    differences: dict[str, dict[OutputName, float]] = {}
    skipped: dict[str, str] = {}
    for name, open_program in programs.items():
        try:
            runner = open_program()
        except (RunnerUnavailableError, MissingDependencyError) as exc:
            skipped[name] = str(exc)
            continue
        except BundleError as exc:
            raise ExportError(f"{what}: runner {name} cannot load the graph: {exc.__cause__ or exc}") from exc
        try:
            differences[name] = _differences(runner, inputs, expected, limits, what=what)
        except _DifferenceError as exc:
            if not (openvino_is_wrong and runner.runtime == "OpenVINO"):
                raise
            skipped[name] = f"{exc}; {openvino_is_wrong}"
        finally:
            runner.close()
            del runner  # each runner has several copies of the weights, so that only one may be open
            release_memory()
    return differences, skipped


def _differences(
    runner: Runner,
    inputs: NDArray[Any],
    expected: Mapping[OutputName, NDArray[Any]],
    limits: Mapping[OutputName, float],
    *,
    what: str,
) -> dict[OutputName, float]:
    """Return name of an output → largest absolute difference, in the largest batches and in batches of one input.

    The arguments and errors are those of `proven_programs`.
    """
    largest = dict.fromkeys(expected, 0.0)
    for size in (runner.max_batch, 1):
        parts = [inputs[start : start + size] for start in range(0, len(inputs), size)]
        try:
            answers = [_answers(runner, part) for part in parts]
        except BundleError as exc:
            raise ExportError(f"{what}: runner {runner.label} cannot run the graph: {exc.__cause__ or exc}") from exc
        except GmmvitError:
            raise
        # If a runtime loads the graph but cannot run the graph, each runtime raises an exception class of its own.
        except Exception as exc:
            raise ExportError(f"{what}: runner {runner.label} cannot run the graph: {str(exc).strip()}") from exc
        for output, values in expected.items():
            computed = np.concatenate([answer[output] for answer in answers])
            if computed.shape != values.shape:
                raise ExportError(
                    f"{what}: expected {output} of shape {values.shape}, got {computed.shape} from {runner.label}"
                )
            difference = float(np.abs(computed - values).max())
            if not difference <= limits[output]:  # also True if the difference is NaN, unlike difference > limit
                kernels = " with this project's kernels" if runner.own_kernels else ""
                raise _DifferenceError(
                    f"{what}: {runner.runtime or runner.name}'s {output}{kernels} differ from PyTorch's by "
                    f"{difference:.3g}; expected at most {limits[output]:.3g}"
                )
            largest[output] = max(largest[output], difference)
    return largest


def _answers(runner: Runner, rows: NDArray[Any]) -> dict[OutputName, NDArray[Any]]:
    """Run rows as a batch whose size is a power of two, with rows repeated.

    OpenVINO compiles the graph, which copies the weights, for each power of two in the size of a batch.
    """
    size = min(1 << (len(rows) - 1).bit_length(), runner.max_batch)
    answers = runner.run_all(np.resize(rows, (size, *rows.shape[1:])))
    return {output: values[: len(rows)] for output, values in answers.items()}


def require_batches(
    run: Callable[[NDArray[Any]], NDArray[Any]],
    inputs: NDArray[Any],
    expected: NDArray[Any],
    limit: float,
    *,
    max_batch: int,
) -> None:
    """Run the graph in batches of 1, 2 and 3 images and of the largest size, and compare the logits.

    The exporter traces a model with two images. Some models, for example a model with a loop over the images of the
    batch, export without an error to a graph that computes the right logits only for two images.
    run: function that runs the graph: inputs (B, …) → logits (B, C).
    inputs: (N, …), distinct inputs of the graph.  expected: (N, C), the logits of ``inputs``.
    limit: the largest allowed absolute difference.  max_batch: the largest batch that the graph must take.
    Errors: ExportError when a batch fails, or when its logits differ.
    """
    for size in sorted({size for size in (1, 2, 3, max_batch) if size <= max_batch}):
        rows = np.resize(np.arange(len(inputs)), size)
        try:
            logits = run(inputs[rows])
        except GmmvitError:
            raise
        # Each runtime raises an exception class of its own.
        except Exception as exc:
            reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
            raise ExportError(
                f"the exported graph cannot run a batch of {size} images: {reason}", hint=DYNAMIC_BATCH_HINT
            ) from exc
        problem = ""
        shape = (size, *expected.shape[1:])
        if logits.shape != shape:
            problem = f"expected logits of shape {shape}, got {logits.shape}"
        elif not (largest := float(np.abs(logits - expected[rows]).max())) <= limit:  # also True if it is NaN
            problem = f"expected logits within {limit:.3g} of PyTorch's logits, got a difference of {largest:.3g}"
        if problem:
            raise ExportError(
                f"the exported graph, run with a batch of {size} images: {problem}", hint=DYNAMIC_BATCH_HINT
            )
