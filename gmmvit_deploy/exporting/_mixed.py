"""Move projections of an int8 graph to more exact forms until its answers pass a gate (`bundle.gates`).

    error of a projection  the mean square error of the logits if only this projection is quantised
    gain of a projection   its time in the float32 graph minus its time in the int8 graph, in OpenVINO on this machine

Projections move in the order of error over gain, the largest first: each to the dynamic form (`graphs.quantize`), which
keeps the weight in int8 and loses less, or a convolution to float32. After the last of them, the projections that are
dynamic move to float32, in the same order. The number of moves is found by an exponential search, then a binary
search. More moves can fail where fewer pass, so it need not be the smallest. Errors and gates are measured on images
that set no range, with every rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.quantize import can_be_dynamic
from gmmvit_deploy.images.data.images import evenly_spaced
from gmmvit_deploy.progress import OnProgress, Progress
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.openvino_times import projection_gains, relative_time

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.gates import Gate

_MAX_MEASURED = 16
"""Max images on which the error of a projection is measured: a mean over their logits has little noise."""
_TIMED = 8
_MIN_GAIN_MS = 1e-3
"""A smaller gain is noise."""


class Forms(TypedDict):
    """The projections that are not in the static form, by their names in the graph for CPUs."""

    dynamic: tuple[str, ...]
    float32: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judge:
    """A gate with the images that judge it.

    images: (B, …), which set no range.  reference: (B, C), the logits of the float32 graph.
    rows: (B,), the indices of the images among all calibration images.
    labels: the true classes of all calibration images, or None.
    thresholds: (C,), of a multi-label network's logits, or None.  decides: False for features in place of logits.
    Errors: InputError when the images are too few for the gate, or have no labels that it needs.
    """

    gate: Gate
    images: NDArray[Any]
    reference: NDArray[Any]
    rows: NDArray[Any]
    labels: NDArray[Any] | None = None
    thresholds: NDArray[Any] | None = None
    decides: bool = True

    def __post_init__(self) -> None:
        top1 = None if self._labels is None else float((self.reference.argmax(1) == self._labels).mean())
        self.gate.require_images(len(self.images), top1)

    @property
    def _labels(self) -> NDArray[Any] | None:
        return None if self.labels is None else self.labels[self.rows]

    def row(self, graph: ir.Model) -> dict[str, Any]:
        """Return what `Gate.row`, or for features `Gate.row_of_features`, measures of a graph."""
        logits = emulated_logits(graph, self.images, name="the int8 graph")
        if not self.decides:
            return self.gate.row_of_features(logits, self.reference)
        return self.gate.row(logits, self.reference, self._labels, self.thresholds)


def moved_projections(
    plain: ir.Model,
    projections: Sequence[ir.Node],
    graph_with: Callable[..., ir.Model],
    judge: Judge,
    on_progress: OnProgress,
) -> tuple[Forms, dict[str, Any]]:
    """Return (the projections that are not in the static form, notes for the record of the variant).

    plain: the float32 graph.  projections: its nodes that int8 quantises.
    graph_with: returns the int8 graph with the projections ``dynamic`` and ``float32`` in these forms.
    The notes have a curve: for each judged graph, the numbers of projections in each form, and its time over float32's.
    Errors: ExportError when the gate does not hold with a single projection in int8.
    MissingDependencyError when OpenVINO is not installed.
    """
    names = [str(node.name) for node in projections]
    timed = judge.images[:_TIMED]
    errors: dict[str, float] = {}
    gains: dict[str, float] = {}
    order: list[str] = []
    matrices = set(can_be_dynamic(projections))
    max_moves = len(names) + sum(name in matrices for name in names) - 1  # with one more, no projection is in int8
    curve: dict[int, dict[str, Any]] = {}

    def moved(count: int) -> Forms:
        """Return the forms after ``count`` moves: all projections to the dynamic form, then these to float32."""
        first = order[:count]
        again = [name for name in order if name in matrices][: max(count - len(order), 0)]
        float32 = tuple(name for name in first if name not in matrices or name in again)
        return {"dynamic": tuple(name for name in first if name not in float32), "float32": float32}

    def holds(count: int) -> bool:
        forms = moved(count)
        numbers = {"dynamic": len(forms["dynamic"]), "float32": len(forms["float32"])}
        words = ", ".join(f"{number} {form}" for form, number in numbers.items())
        on_progress(Progress(f"try int8 with {words} of {len(names)} projections"))
        graph = graph_with(**forms)
        curve[count] = {**numbers, **judge.row(graph), "time": relative_time(plain, graph, timed)}
        return bool(curve[count]["holds"])

    failed, count = -1, 0
    while not holds(count):
        if count == max_moves:
            best, kept = curve[count], ""
            for name, what in (("kept", "decisions"), ("neighbours", "nearest neighbours")):
                if name in best:
                    share, (low, high) = best[name], best[f"{name}_interval"]
                    kept = (
                        f"{share:.2%} of the {what} of {len(judge.images)} images are kept ({low:.2%} to {high:.2%}), "
                    )
            raise ExportError(
                f"the gate does not hold before all {len(names)} projections are in float32: with one in int8, {kept}"
                f"{best['db']:.1f} dB",
                hint="type a lower gate, or use fp32",
            )
        if not order:
            errors = _errors(names, graph_with, judge, on_progress)
            gains = projection_gains(plain, graph_with(), projections, timed)
            order = sorted(names, key=lambda name: -errors[name] / max(gains[name], _MIN_GAIN_MS))
        failed, count = count, min(max(1, 2 * count), max_moves)
    while count - failed > 1:
        middle = (failed + count) // 2
        if holds(middle):
            count = middle
        else:
            failed = middle
    total = sum(errors.values())
    forms = moved(count)
    return forms, {
        "moved": [
            {
                "projection": name,
                "form": "float32" if name in forms["float32"] else "dynamic",
                "error_share": errors[name] / total if total else 0.0,
                "gain_ms": gains[name],
            }
            for name in order[:count]
        ],
        "curve": [curve[number] for number in sorted(curve)],
        "projections": len(names),
    }


def _errors(
    names: Sequence[str], graph_with: Callable[..., ir.Model], judge: Judge, on_progress: OnProgress
) -> dict[str, float]:
    """Return name of a projection → the mean square error of the logits if only this projection is quantised."""
    rows = evenly_spaced(len(judge.images), _MAX_MEASURED)
    errors = {}
    for number, name in enumerate(names):
        on_progress(Progress("measure the error of each projection in int8", number, len(names)))
        alone = graph_with(float32=tuple(other for other in names if other != name))
        logits = emulated_logits(alone, judge.images[rows], name="the int8 graph")
        errors[name] = float(((logits - judge.reference[rows]) ** 2).mean())
    return errors
