"""Choose how a graph is quantised to int8, by the logits of images that did not set the ranges.

No fixed recipe is right for every network. Of the calibration images, three quarters are measured, and the recipes are
compared on the last quarter: the score is the signal-to-noise ratio of the quantised graph's logits, in dB, against
the float32 graph's (`tolerances.signal_to_noise_db`), computed with every rounding of the graph. One part of the recipe
is varied after the other, and the best value is kept:

    rounding   of weights: nearest, or compensated on the calibration images (`graphs.rounding`)
    smoothing  0 (none) or a strength of SmoothQuant (`graphs.smoothing`)
    ranges     of activations (`graphs.calibration`)

Rounding and smoothing are chosen on a quarter of each batch, with ranges of extremes; then ranges and moments are
measured on all images. Batches with few images are measured whole.

Features are scored in the same way: on 64 images, the share of nearest neighbours that a recipe keeps says less about
other images than the dB do.

A graph for CPUs has zero points where ranges are far from symmetric. TensorRT has none.

The graph is static, with a range for each activation. With a gate, half of the images are judged, and projections move
to the dynamic form (`graphs.quantize`), or to float32, until the gate holds (`_mixed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting._mixed import Judge, moved_projections
from gmmvit_deploy.graphs.calibration import RANGES, Calibration, RangeRule, extremes_of_divided, ranges_of
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.quantize import (
    projections_of,
    quantize_graph,
    weight_matrix,
    weight_scales,
)
from gmmvit_deploy.graphs.rounding import compensated_rounding
from gmmvit_deploy.graphs.smoothing import smoothed
from gmmvit_deploy.graphs.wiring import input_of, stored
from gmmvit_deploy.images.data.images import evenly_spaced
from gmmvit_deploy.inference.cores import cpu_name
from gmmvit_deploy.inference.precision import SPECS
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.onnxruntime import calibrate
from gmmvit_deploy.tolerances import signal_to_noise_db

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from gmmvit_deploy.inference.precision import Precision

_STRENGTHS = (0.0, 0.3, 0.5, 0.7)
_JUDGED_SHARE = 4
JUDGED_SHARE_OF_GATE = 2
_MAX_JUDGED = 64
_TRIALS = 1 + len(_STRENGTHS) + len(RANGES)
_SCREENING = 4
"""Rounding and smoothing are chosen on every fourth image of each batch, if the batch has at least 16."""
_MOMENT_ROWS = 32768
"""Max rows of all images from which the second moments of an activation are measured."""
_OF_ANSWERS = ("screened", "tried", "gate", "gate_images", "curve", "moved", "projections")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a graph is quantised, as the head of this module says.

    dynamic, float32: the projections that are not in the static form, by their names in the graph for CPUs.
    """

    rounding: Literal["nearest", "compensated"] = "compensated"
    smoothing: float = 0.0
    ranges: RangeRule = "extremes"
    dynamic: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()


class _Workshop:
    """Quantises a graph by recipes; what a smoothing strength needs is computed once."""

    def __init__(
        self,
        model: ir.Model,
        measured: Sequence[NDArray[Any]],
        judged: NDArray[Any],
        *,
        zero_points: bool,
        types: Precision,
        over_images: bool,
    ) -> None:
        self._model, self._measured, self._judged = model, measured, judged
        self._zero_points, self._types, self._over_images = zero_points, types, over_images
        self._moment_rows = -(-_MOMENT_ROWS // len(measured))
        screened = [batch[:: _SCREENING if len(batch) >= _SCREENING**2 else 1] for batch in measured]
        self._plain = calibrate(model, screened, moment_rows=self._moment_rows)
        self._all: Calibration | None = None
        self._reference = emulated_logits(model, judged, name="the float32 graph")
        self._smoothed: dict[float, tuple[ir.Model, dict[str, NDArray[Any]]]] = {0.0: (model, {})}
        self._rounded: dict[tuple[float, str], NDArray[Any]] = {}

    def measure_all(self, strength: float) -> int:
        """Measure ranges and moments on all images, for the last strength; return the number of images."""
        self._all = calibrate(self._smooth(strength)[0], self._measured, moment_rows=self._moment_rows)
        self._rounded.clear()
        return self._all.images

    def graph(self, recipe: Recipe) -> tuple[ir.Model, dict[str, tuple[float, float]]]:
        """Return (the quantised graph, the range of each activation)."""
        model, _ = self._smooth(recipe.smoothing)
        ranges = dict(self._ranges(recipe))
        rounded = self._round(recipe.smoothing) if recipe.rounding == "compensated" else None
        graph = quantize_graph(
            model,
            "int8",
            ranges,
            zero_points=self._zero_points,
            rounded=rounded,
            float32=recipe.float32,
            dynamic=recipe.dynamic,
        )
        return graph, ranges

    def score(self, recipe: Recipe) -> float:
        """Return the signal-to-noise ratio in dB of a recipe's logits, with the graph cast as it will be written."""
        graph = cast_graph(self.graph(recipe)[0], self._types)
        logits = emulated_logits(graph, self._judged, name="the int8 graph")
        return signal_to_noise_db(logits, self._reference, over_images=self._over_images)

    def forget_all_but(self, strength: float) -> None:
        """Free the memory of other strengths: each holds a copy of the weights."""
        kept = {strength, 0.0}
        self._smoothed = {one: smooth for one, smooth in self._smoothed.items() if one in kept}
        self._rounded = {key: matrix for key, matrix in self._rounded.items() if key[0] in kept}

    def _smooth(self, strength: float) -> tuple[ir.Model, dict[str, NDArray[Any]]]:
        """Return (the smoothed graph, name of an activation → the factor of each channel)."""
        if strength not in self._smoothed:
            channels = {name: observed.channels for name, observed in self._plain.observed.items()}
            self._smoothed[strength] = smoothed(self._model, channels, strength)
        return self._smoothed[strength]

    def _ranges(self, recipe: Recipe) -> Mapping[str, tuple[float, float]]:
        if self._all is not None:
            return ranges_of(self._all, recipe.ranges)
        return extremes_of_divided(self._plain, self._smooth(recipe.smoothing)[1])

    def _round(self, strength: float) -> dict[str, NDArray[Any]]:
        """Return the compensated integers of each weight of a matrix product; convolutions are rounded to nearest."""
        model, factors = self._smooth(strength)
        rounded: dict[str, NDArray[Any]] = {}
        for node in projections_of(model.graph):
            activation, weight = (str(input_of(node, index).name) for index in (0, 1))
            moments = (self._all or self._plain).observed[activation].moments
            if node.op_type == "Conv" or weight in rounded or moments is None:
                continue
            factor = factors.get(activation)
            key = (0.0 if factor is None else strength, weight)
            if key not in self._rounded:
                if factor is not None and self._all is None:
                    moments = moments / (factor[:, None] * factor)
                matrix = weight_matrix(node, stored(node.inputs[1]))
                self._rounded[key] = compensated_rounding(
                    matrix, moments, weight_scales(matrix, "int8"), largest=SPECS["int8"].quantized_max
                )
            rounded[weight] = self._rounded[key]
        return rounded


def quantized_by_choice(
    model: ir.Model,
    batches: Iterable[NDArray[Any]],
    *,
    zero_points: bool,
    types: Precision = "fp32",
    over_images: bool = False,
    recipe: Recipe | None = None,
    judge_from: Callable[..., Judge] | None = None,
    on_progress: OnProgress = ignore,
) -> tuple[ir.Model, dict[str, Any]]:
    """Return the int8 graph of the best recipe, and notes for the record of the variant.

    model: the float32 graph.  batches: the calibration images, in the form of the graph's input.
    zero_points: True for a graph for CPUs.  types: the precision of the operators that are not quantised, to which the
    caller casts the graph.  over_images: as in `signal_to_noise_db`, True for a multi-label network.
    recipe: the recipe that another graph of the network already chose; None tries several.
    judge_from: makes the `Judge` of a gate from its images, their rows and the reference; None without a gate. With a
    ``recipe``, the gate is measured, and need not hold.
    Errors: InputError when there are too few images, or a value of an activation is not finite; and as
    `moved_projections`.
    """
    measured, images, rows = _divided(batches, _JUDGED_SHARE if judge_from is None else JUDGED_SHARE_OF_GATE)
    judge = None
    if judge_from is not None:
        reference = emulated_logits(model, images, name="the float32 graph")
        judge = judge_from(images=images, rows=rows, reference=reference)
    judged = images[evenly_spaced(len(images), _MAX_JUDGED)]
    on_progress(Progress("calibrate int8"))
    workshop = _Workshop(model, measured, judged, zero_points=zero_points, types=types, over_images=over_images)
    screened: dict[Recipe, float] = {}
    scores: dict[Recipe, float] = {}

    def best(of: dict[Recipe, float]) -> Recipe:
        return max(of, key=lambda known: of[known])

    def score(recipes: Iterable[Recipe], into: dict[Recipe, float]) -> Recipe:
        """Score the recipes that are new, and return the best one."""
        for one in recipes:
            if one not in into:
                on_progress(Progress(f"try int8: {_words(one)}", len(screened) + len(scores), _TRIALS))
                into[one] = workshop.score(one)
                workshop.forget_all_but(best(into).smoothing)
        return best(into)

    if recipe is None:
        start = score([Recipe(rounding="nearest"), Recipe()], screened)
        start = score((replace(start, smoothing=strength) for strength in _STRENGTHS), screened)
        recipes = [replace(start, ranges=rule) for rule in RANGES]
    else:
        recipes = [recipe]
    measured_images = workshop.measure_all(recipes[0].smoothing)
    chosen = score(recipes, scores)
    notes: dict[str, Any] = {}
    if judge is not None and recipe is None:
        static = chosen
        moved, notes = moved_projections(
            model,
            projections_of(model.graph),
            lambda **forms: workshop.graph(replace(static, **forms))[0],
            judge,
            on_progress,
        )
        chosen = replace(static, **moved)
        score([chosen], scores)
    graph, ranges = workshop.graph(chosen)
    if judge is not None:
        numbers = {"dynamic": len(chosen.dynamic), "float32": len(chosen.float32)}
        curve = notes.pop("curve", None) or [{**numbers, **judge.row(cast_graph(graph, types))}]
        notes |= {"gate": asdict(judge.gate), "gate_images": len(images), "curve": curve}
    return graph, {
        **notes,
        "images": measured_images + len(images),
        "judged_images": len(judged),
        "ranges": {name: list(both) for name, both in ranges.items()},
        "recipe": {**asdict(chosen), "db": scores[chosen]},
        "machine": cpu_name(),
        "screened": [{**asdict(one), "db": db} for one, db in screened.items()],
        "tried": [{**asdict(one), "db": db} for one, db in scores.items()],
    }


def recipe_from(notes: Mapping[str, Any] | None) -> Recipe | None:
    """Return the recipe of a graph for GPUs from the notes of `quantized_by_choice` for CPUs; None without notes.

    TensorRT has no dynamic form; these projections stay in float32.
    """
    if not notes:
        return None
    recipe = notes["recipe"]
    parts = {name: recipe[name] for name in ("rounding", "smoothing", "ranges")}
    return Recipe(**parts, float32=(*recipe["dynamic"], *recipe["float32"]))


def without_judgement(notes: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return notes of `quantized_by_choice` without what the answers of the network showed: dB and gates.

    `images_of_ranges` then also returns some images that only judged a gate.
    """
    if notes is None:
        return None
    kept = {name: value for name, value in notes.items() if name not in _OF_ANSWERS}
    if "recipe" in kept:
        kept["recipe"] = {name: value for name, value in kept["recipe"].items() if name != "db"}
    return kept


def images_of_ranges(notes: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the SHA-256 of the images that set ranges, of the notes in the record of a graph (`_divided`)."""
    if not notes:
        return ()
    share = JUDGED_SHARE_OF_GATE if "gate" in notes else _JUDGED_SHARE
    return [digest for number, digest in enumerate(notes["image_sha256"]) if number % share != share - 1]


def _divided(batches: Iterable[NDArray[Any]], share: int) -> tuple[list[NDArray[Any]], NDArray[Any], NDArray[Any]]:
    """Return (batches of images to measure, images to judge, the indices of these): one of ``share`` is judged."""
    import numpy as np

    measured, judged, count = [], [], 0
    for batch in batches:
        of_batch = np.arange(count, count + len(batch)) % share == share - 1
        judged.append(batch[of_batch])
        measured.append(batch[~of_batch])
        count += len(batch)
    if count < _JUDGED_SHARE:
        raise InputError(
            f"calibration needs at least {_JUDGED_SHARE} images, got {count}",
            hint="type --calibration and a folder or an .npz of images",
        )
    return [batch for batch in measured if len(batch)], np.concatenate(judged), np.arange(share - 1, count, share)


def _words(recipe: Recipe) -> str:
    return f"{recipe.rounding} rounding, smoothing {recipe.smoothing:g}, {recipe.ranges}"
