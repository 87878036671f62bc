"""Compare the logits of each runner with the golden logits, which PyTorch computed at export.

A runner is a program that computes logits, such as a runtime with a graph. Each runner computes the logits of every
golden input twice: in the largest batches that the runner accepts, and in batches of a single input.
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

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["golden_features", "golden_rows", "proven_difference", "proven_features", "proven_programs"]


def golden_rows(bundle: Bundle) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (inputs, logits) of the bundle's golden set: first the golden inputs, then the preprocessed images."""
    golden = bundle.golden_set()
    if not golden.images:
        return golden.inputs, golden.logits
    images = bundle.inputs_from_pixels(golden.image_pixels)
    return np.concatenate([golden.inputs, images]), np.concatenate([golden.logits, golden.image_logits])


def golden_features(bundle: Bundle) -> NDArray[Any]:
    """Return the features (B, D) of the inputs of `golden_rows`, for a bundle with logits and features."""
    golden = bundle.golden_set()
    if golden.features is None or golden.image_features is None:
        raise BundleError(f"{bundle.path}: golden.npz has no features, which the manifest states")
    return np.concatenate([golden.features, golden.image_features]) if golden.images else golden.features


def proven_features(runner: Runner, inputs: NDArray[Any], expected: NDArray[Any], limit: float, *, what: str) -> float:
    """Return the largest absolute difference between the runner's features and ``expected``.

    The arguments and errors are those of `proven_difference`, with features in place of logits.
    """
    size = runner.max_batch
    parts = [runner.run_all(inputs[i : i + size])["features"] for i in range(0, len(inputs), size)]
    features = np.concatenate(parts)
    if features.shape != expected.shape:
        raise ExportError(f"{what}: expected features {expected.shape}, got {features.shape} from {runner.label}")
    largest = float(np.abs(features - expected).max())
    if not largest <= limit:  # also True if the difference is NaN
        raise ExportError(
            f"{what}: the features of {runner.label} differ from PyTorch's by {largest:.3g}; expected at most "
            f"{limit:.3g}"
        )
    return largest


class _DifferenceError(ExportError):
    """A runner's logits differ by more than the limit."""


def proven_programs(
    programs: Mapping[str, Callable[[], Runner]],
    inputs: NDArray[Any],
    expected: NDArray[Any],
    limit: float,
    *,
    what: str,
    openvino_is_wrong: str = "",
) -> tuple[dict[str, float], dict[str, str]]:
    """Compare the logits of every runner that is available on this machine with ``expected``.

    programs: name of a runner → function that opens the runner.  The other arguments are as in `proven_difference`.
    openvino_is_wrong: the reason why OpenVINO computes other logits on this CPU although the graph is right, or "".
    A runner of OpenVINO whose difference exceeds the limit is then skipped with this reason.
    Returns (name of a runner → largest difference, name of a runner → reason why the runner was skipped).
    Errors: ExportError as in `proven_difference`, and when an available runner cannot load the graph.
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
            try:
                differences[name] = proven_difference(runner, inputs, expected, limit, what=what)
            except _DifferenceError as exc:
                if not (openvino_is_wrong and runner.runtime == "OpenVINO"):
                    raise
                skipped[name] = f"{exc}; {openvino_is_wrong}"
    return differences, skipped


def proven_difference(
    runner: Runner, inputs: NDArray[Any], expected: NDArray[Any], limit: float, *, what: str
) -> float:
    """Return the largest absolute difference between the runner's logits and ``expected``.

    inputs: the golden inputs (B, …).  expected: the golden logits (B, C).  limit: the largest allowed difference.
    what: the file that error messages name.
    Errors: ExportError when the difference exceeds the limit or is NaN, when the logits do not have the shape of
    ``expected``, or when the runtime cannot run the graph.
    """
    size = runner.max_batch
    try:
        batched = np.concatenate([runner.run(inputs[i : i + size]) for i in range(0, len(inputs), size)])
        single = np.concatenate([runner.run(row[None]) for row in inputs])
    except BundleError as exc:
        raise ExportError(f"{what}: runner {runner.label} cannot run the graph: {exc.__cause__ or exc}") from exc
    except GmmvitError:
        raise
    # If a runtime loads the graph but cannot run the graph, each runtime raises an exception class of its own.
    except Exception as exc:
        raise ExportError(f"{what}: runner {runner.label} cannot run the graph: {str(exc).strip()}") from exc
    if batched.shape != expected.shape:
        raise ExportError(f"{what}: expected logits of shape {expected.shape}, got {batched.shape} from {runner.label}")
    largest = max(float(np.abs(logits - expected).max()) for logits in (batched, single))
    if not largest <= limit:  # also True if the difference is NaN, unlike largest > limit
        kernels = " with this project's kernels" if runner.own_kernels else ""
        raise _DifferenceError(
            f"{what}: {runner.runtime or runner.name}'s logits{kernels} differ from PyTorch's by {largest:.3g}; "
            f"expected at most {limit:.3g}"
        )
    return largest
