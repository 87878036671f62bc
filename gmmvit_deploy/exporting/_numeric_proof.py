"""Run an exported graph, and compare its outputs with the golden outputs, which PyTorch computed at export.

A runner is a program that computes the outputs, such as a runtime with a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from gmmvit_deploy.errors import BundleError, ExportError, GmmvitError, MissingDependencyError, RunnerUnavailableError
from gmmvit_deploy.inference.reference_outputs import largest_differences, wrong_in_batch, wrong_output
from gmmvit_deploy.models.specs import OutputName
from gmmvit_deploy.runtimes.programs.memory import release_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from gmmvit_deploy.runtimes.runners.runner import Runner

DYNAMIC_BATCH_HINT = (
    "in the code of the model, compute the images of a batch together, without a loop over the images, and write "
    "x.shape[0] in place of len(x)"
)


class Proven(NamedTuple):
    """The runners of a graph on this machine.

    differences: name of a runner that gives the golden outputs → name of an output → its largest difference.
    skipped: name of a runner that this machine does not have → the reason.
    wrong: name of a runner that cannot load or run the graph, or gives other outputs → what it does.
    """

    differences: dict[str, dict[OutputName, float]]
    skipped: dict[str, str]
    wrong: dict[str, str]


def proven_programs(
    programs: Mapping[str, Callable[[], Runner]],
    inputs: NDArray[Any],
    expected: Mapping[OutputName, NDArray[Any]],
    limits: Mapping[OutputName, float],
) -> Proven:
    """Compare the outputs of every runner that is available on this machine with the golden outputs.

    programs: name of a runner → function that opens the runner.
    inputs: the golden inputs (B, …).  expected: name of an output → its golden values (B, …).
    limits: name of an output → the largest allowed absolute difference.
    """
    proven = Proven({}, {}, {})
    for name, open_program in programs.items():
        try:
            runner = open_program()
        except (RunnerUnavailableError, MissingDependencyError) as exc:
            proven.skipped[name] = str(exc)
            continue
        except BundleError as exc:
            proven.wrong[name] = f"it cannot load the graph: {exc.__cause__ or exc}"
            continue
        try:
            proven.differences[name] = _differences(runner, inputs, expected, limits)
        except _WrongError as exc:
            proven.wrong[name] = str(exc)
        finally:
            runner.close()
            del runner  # each runner has several copies of the weights, so that only one may be open
            release_memory()
    return proven


class _WrongError(Exception):
    """A runner cannot run the graph, or gives other outputs."""


def _differences(
    runner: Runner,
    inputs: NDArray[Any],
    expected: Mapping[OutputName, NDArray[Any]],
    limits: Mapping[OutputName, float],
) -> dict[OutputName, float]:
    """Return name of an output → largest absolute difference, in the largest batches and in batches of one input."""
    # OpenVINO compiles the graph, which copies the weights, for each power of two in the size of a batch.
    sizes = (min(1 << (len(inputs) - 1).bit_length(), runner.max_batch), 1)
    largest = dict.fromkeys(expected, 0.0)
    for size in sizes:
        try:
            differences = largest_differences(runner.computed, inputs, expected, size)
        except MemoryError:
            raise
        # If a runtime loads the graph but cannot run the graph, each runtime raises an exception class of its own.
        except Exception as exc:
            reason = str(exc.__cause__ or exc).strip() or type(exc).__name__
            raise _WrongError(f"it cannot run the graph in a batch of {size}: {reason}") from exc
        if problem := wrong_output(differences, limits):
            raise _WrongError(problem)
        largest = {output: max(largest[output], differences[output]) for output in largest}
    return largest


def require_batches(
    run: Callable[[NDArray[Any]], NDArray[Any]],
    inputs: NDArray[Any],
    expected: NDArray[Any],
    limit: float,
    *,
    max_batch: int,
) -> None:
    """Run the graph in batches of 1, 2 and 3 images and of the largest size, and compare the logits.

    The exporter traces a model with two images: a loop over the images of the batch exports to a graph for two.
    run: function that runs the graph: inputs (B, …) → logits (B, C).
    inputs: (N, …), distinct inputs of the graph.  expected: (N, C), the logits of ``inputs``.
    limit: the largest allowed absolute difference.  max_batch: the largest batch that the graph must take.
    Errors: ExportError when a batch fails, or when its logits differ.
    """
    for size in sorted({size for size in (1, 2, 3, max_batch) if size <= max_batch}):
        try:
            problem = wrong_in_batch(
                lambda rows: [run(rows)], inputs[:size], {"logits": expected[:size]}, {"logits": limit}, size
            )
        except GmmvitError:
            raise
        # Each runtime raises an exception class of its own.
        except Exception as exc:
            reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
            raise ExportError(
                f"the exported graph cannot run a batch of {size} images: {reason}", hint=DYNAMIC_BATCH_HINT
            ) from exc
        if problem:
            raise ExportError(f"the exported graph is wrong: {problem}", hint=DYNAMIC_BATCH_HINT)
