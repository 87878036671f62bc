"""Compare the logits of each runner with the golden logits, in whole batches and row by row."""

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
    """Return (inputs, logits) of the golden set, including its encoded images after preprocessing."""
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

    programs: runner → function that opens it.  Other arguments: see `proven_difference`.
    Returns (runner → its largest difference, runner → the reason why it is not available).
    Errors: as `proven_difference`; ExportError when a runtime cannot load a file of a precision that it supports.
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
            raise ExportError(f"{what}: runner {name} cannot load it: {exc.__cause__ or exc}") from exc
        with program as runner:
            differences[name] = proven_difference(runner, inputs, expected, limit, what=what)
    return differences, skipped


def proven_difference(
    runner: Runner, inputs: NDArray[Any], expected: NDArray[Any], limit: float, *, what: str
) -> float:
    """Return the largest absolute difference between the runner's logits and ``expected`` (B, C).

    what: name of the file in errors.
    Errors: ExportError when the difference exceeds the limit or is NaN, when the logits have another shape, or when
    the runtime cannot run its graph.
    """
    size = runner.max_batch
    try:
        batched = np.concatenate([runner.run(inputs[i : i + size]) for i in range(0, len(inputs), size)])
        single = np.concatenate([runner.run(row[None]) for row in inputs])
    except GmmvitError:
        raise
    # Each runtime raises its own exception classes for a graph that it loads but cannot run.
    except Exception as exc:
        raise ExportError(f"{what}: runner {runner.label} cannot run it: {str(exc).strip()}") from exc
    if batched.shape != expected.shape:
        raise ExportError(f"{what}: runner {runner.label} gives logits {batched.shape}, expected {expected.shape}")
    largest = max(float(np.abs(logits - expected).max()) for logits in (batched, single))
    if not largest <= limit:  # so that NaN does not pass
        kernels = " with our kernels" if runner.own_kernels else ""
        raise ExportError(
            f"{what}: {runner.runtime or runner.name}'s logits{kernels} differ from PyTorch's by {largest:.3g}; "
            f"expected at most {limit:.3g}"
        )
    return largest
