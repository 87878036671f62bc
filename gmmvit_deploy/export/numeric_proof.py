"""Compare the logits of each runner with the golden logits.

A runner is a program that computes logits, such as a runtime with a graph. Each runner computes every golden input
twice: in the largest batches that it accepts, and alone in a batch of 1.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.runners.runner import Runner

__all__ = ["golden_rows", "proven_difference", "proven_programs"]


def golden_rows(bundle: Bundle) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (inputs, logits) of the golden inputs, followed by those of the golden images after preprocessing."""
    golden = bundle.golden_set()
    if not golden.images:
        return golden.inputs, golden.logits
    images = bundle.inputs_from_pixels(golden.image_pixels)
    return np.concatenate([golden.inputs, images]), np.concatenate([golden.logits, golden.image_logits])


def proven_programs(
    programs: Mapping[str, Callable[[], Runner]],
    inputs: NDArray[Any],
    expected: NDArray[Any],
    limit: float,
    *,
    what: str,
) -> tuple[dict[str, float], dict[str, str]]:
    """Compare every program that is available on this machine with ``expected``.

    programs: name of a runner → function that opens the runner.  The other arguments are as in `proven_difference`.
    Returns (runner → largest difference, runner → reason why the runner is not available).
    Errors: ExportError as in `proven_difference`, and when a runtime cannot load a file of a precision that the runtime
    supports.
    """
    differences: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name, open_program in programs.items():
        try:
            program = open_program()
        except (RunnerUnavailableError, MissingDependencyError) as exc:
            skipped[name] = str(exc)
            continue
        except BundleError as exc:
            raise ExportError(f"{what}: runner {name} cannot load the graph: {exc.__cause__ or exc}") from exc
        with program as runner:
            differences[name] = proven_difference(runner, inputs, expected, limit, what=what)
    return differences, skipped


def proven_difference(
    runner: Runner, inputs: NDArray[Any], expected: NDArray[Any], limit: float, *, what: str
) -> float:
    """Return the largest absolute difference between the runner's logits and ``expected`` (B, C).

    what: the name of the graph's file, for error messages.
    Errors: ExportError when the difference exceeds the limit or is NaN, when the logits do not have the shape of
    ``expected``, or when the runtime cannot run the graph.
    """
    size = runner.max_batch
    try:
        batched = np.concatenate([runner.run(inputs[i : i + size]) for i in range(0, len(inputs), size)])
        single = np.concatenate([runner.run(row[None]) for row in inputs])
    except GmmvitError:
        raise
    # Each runtime raises its own exception classes for a graph that it loads but cannot run.
    except Exception as exc:
        raise ExportError(f"{what}: runner {runner.label} cannot run the graph: {str(exc).strip()}") from exc
    if batched.shape != expected.shape:
        raise ExportError(f"{what}: expected logits of shape {expected.shape}, got {batched.shape} from {runner.label}")
    largest = max(float(np.abs(logits - expected).max()) for logits in (batched, single))
    if not largest <= limit:  # unlike largest > limit, this also refuses NaN
        kernels = " with this project's kernels" if runner.own_kernels else ""
        raise ExportError(
            f"{what}: {runner.runtime or runner.name}'s logits{kernels} differ from PyTorch's by {largest:.3g}; "
            f"expected at most {limit:.3g}"
        )
    return largest
