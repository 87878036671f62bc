"""The threshold of a cascade: which images int8 or bf16 answers, and which float32 computes again.

    margin    of an image's decision in the fast program (`inference.cascade.decision_margins`)
    loss      margin − the margin of the same decision in float32; the decision changes if the loss is above the margin
    deferred  images with margin < threshold
    kept      the share of the images that are deferred, or keep their decision

The threshold is the larger of two:

- the smallest at which the exact lower bound of ``kept`` (`intervals.exact_lower_bound`) reaches a target; where too
  few images prove the target, the smallest at which no image changes;
- the smallest at which the changes expected if losses do not depend on margins, mean over all pairs of images i, j of
  [margin_i ≥ threshold and loss_j > margin_i], are an eighth of what the target allows (`_ALLOWED`).

`gmmvit optimize` writes the record beside the graphs: ``graphs/<runtime>[+kernels]-<precision>[-<form>]+fp32.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.variants import GRAPHS
from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.files.writing import new_file
from gmmvit_deploy.inference.runner_name import CASCADE_SUFFIX, RunnerName
from gmmvit_deploy.intervals import exact_lower_bound

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle

KEEP_DECISIONS = 0.998
"""The share of the decisions that a cascade keeps, if the user states no other."""
_ALLOWED = 1 / 8
"""Images that neither trained nor calibrated a network are undecided two to three times as often as those that did, and
the undecided among them lose more (DINOv2 on photographs, `benchmarks/results/int8_cascade.md`)."""
_FORMAT = "gmmvit-cascade/1"
_CURVE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtThreshold:
    """What a threshold gives on the images that chose it.

    deferred: the share of the images that float32 computes again.
    kept, kept_low: the share of kept decisions, and its lower bound.
    """

    deferred: float
    kept: float
    kept_low: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeRecord:
    """The evidence of a threshold.

    runner: the fast runner that computed the margins, such as ``openvino+kernels:int8-static``.
    bundle_sha256, graph_sha256: of the bundle, and of the graph that this runner loads.
    keep_decisions: the target.
    margins, losses, image_sha256: of each image.  source: of the images, which set no range of the graph.
    chose_graph: how many of them chose the recipe of the graph.
    golden_margins: of the reference inputs.
    """

    runner: str
    bundle_sha256: str
    graph_sha256: str
    keep_decisions: float
    threshold: float
    margins: tuple[float, ...]
    losses: tuple[float, ...]
    image_sha256: tuple[str, ...]
    source: str
    chose_graph: int
    golden_margins: tuple[float, ...]
    versions: Mapping[str, str]

    def with_target(self, keep_decisions: float) -> CascadeRecord:
        """Return the record of another target, from the same images."""
        threshold = chosen_threshold(np.array(self.margins), np.array(self.losses), keep_decisions)
        return replace(self, keep_decisions=keep_decisions, threshold=threshold)

    def at(self, threshold: float) -> AtThreshold:
        margins, losses = np.array(self.margins), np.array(self.losses)
        stays = margins >= threshold
        kept = len(margins) - int((stays & (losses > margins)).sum())
        return AtThreshold(
            deferred=float((~stays).mean()), kept=kept / len(margins), kept_low=exact_lower_bound(kept, len(margins))
        )

    @property
    def chosen(self) -> AtThreshold:
        return self.at(self.threshold)

    @property
    def curve(self) -> list[dict[str, float]]:
        """What several shares of deferred images give."""
        at = [self.at(float(np.quantile(self.margins, share, method="higher"))) for share in _CURVE]
        return [asdict(point) for point in at]

    def __str__(self) -> str:
        """The result in a sentence."""
        chosen, count = self.chosen, len(self.margins)
        proven = chosen.kept_low >= self.keep_decisions
        more = "" if proven else f"; {count:,} images prove {chosen.kept_low:.2%}, and more is only likely"
        more += f"; {self.chose_graph:,} of them chose the recipe of the graph too" if self.chose_graph else ""
        return (
            f"float32 computes images with a margin below {self.threshold:.3g} again: {chosen.deferred:.1%} of "
            f"{count:,} images of {self.source}, of which {chosen.kept:.2%} keep their decision (target "
            f"{self.keep_decisions:.2%}{more})"
        )


def same_margins(logits: NDArray[Any], reference: NDArray[Any], label_thresholds: NDArray[Any] | None) -> NDArray[Any]:
    """Return the margins (B,) in ``reference`` of the decisions of ``logits``, both (B, C): below 0 if they differ."""
    if label_thresholds is not None:
        sides = np.where(logits >= label_thresholds, 1, -1)
        margins: NDArray[Any] = (sides * (reference - label_thresholds)).min(1)
        return margins
    rows, others = np.arange(len(logits)), reference.copy()
    own = others[rows, logits.argmax(1)]
    others[rows, logits.argmax(1)] = -np.inf
    changes: NDArray[Any] = own - others.max(1)
    return changes


def chosen_threshold(margins: NDArray[Any], losses: NDArray[Any], keep_decisions: float) -> float:
    """Return the smallest threshold that keeps a share of the decisions, as the head of this module says.

    margins, losses: (N,), of N images.
    """
    count = len(margins)
    changed = np.sort(margins[losses > margins])[::-1]

    def with_changes(number: int) -> float:
        return float(np.nextafter(changed[number], np.inf)) if len(changed) > number else 0.0

    numbers = range(min(len(changed), int((1 - keep_decisions) * count)), -1, -1)
    proven = (number for number in numbers if exact_lower_bound(count - number, count) >= keep_decisions)
    ordered = np.sort(margins)[::-1]
    above = count - np.searchsorted(np.sort(losses), ordered, side="right")  # losses above each margin
    too_many = np.flatnonzero(np.cumsum(above) / count**2 > (1 - keep_decisions) * _ALLOWED)
    likely = float(np.nextafter(ordered[too_many[0]], np.inf)) if len(too_many) else 0.0
    return max(with_changes(next(proven, 0)), likely)


def cascade_file(runner: RunnerName) -> str:
    """Return the name of the record of a cascade in the bundle.  runner: its fast runner, with its form."""
    first = replace(runner, cascade=False)
    return f"{GRAPHS}/{str(first).replace(':', '-')}{CASCADE_SUFFIX}.json"


def read_cascade(bundle: Bundle, runner: RunnerName, graph_sha256: str) -> CascadeRecord:
    """Read the record of a cascade.

    runner: its fast runner, with its form.  graph_sha256: of the graph that it loads.
    Errors: BundleError when the record is missing or cannot be read, or is of another bundle or graph.
    """
    path = bundle.path / cascade_file(runner)
    command = f"gmmvit optimize {bundle.path} --data DATA --calibration IMAGES --keep-decisions {KEEP_DECISIONS:g}"
    hint = f"type {command}, which chooses the threshold where the first program alone keeps fewer"
    if not path.is_file():
        raise BundleError(f"{path}: no such file, which states the images that float32 computes again", hint=hint)
    record = _read(path, hint)
    if (record.bundle_sha256, record.graph_sha256) != (bundle.sha256, graph_sha256):
        raise BundleError(f"{path}: its threshold was chosen for another network", hint=hint)
    return record


def cascades_in(bundle: Bundle) -> list[RunnerName]:
    """Return the fast runners of which the bundle has a record, of this graph or an earlier one."""
    files = sorted((bundle.path / GRAPHS).glob(f"*{CASCADE_SUFFIX}.json"))
    return [RunnerName.parse(path.stem.removesuffix(CASCADE_SUFFIX).replace("-", ":", 1)) for path in files]


def _read(path: Path, hint: str) -> CascadeRecord:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != _FORMAT:
            raise ValueError(f"expected the format {_FORMAT!r}")
        del data["curve"]
        if differing := sorted({field.name for field in fields(CascadeRecord)} ^ set(data)):
            raise ValueError(f"differing fields: {', '.join(differing)}")
        lists = {name: tuple(values) for name, values in data.items() if isinstance(values, list)}
        return CascadeRecord(**{**data, **lists})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BundleError(f"{path}: expected the JSON record of a cascade: {exc}", hint=hint) from exc


def write_cascade(bundle: Bundle, runner: RunnerName, record: CascadeRecord) -> None:
    """Write the record of a cascade into the bundle.  Errors: OutputError when it cannot be written."""
    data = {"format": _FORMAT, **asdict(record), "curve": record.curve}
    (bundle.path / GRAPHS).mkdir(exist_ok=True)
    with new_file(bundle.path / cascade_file(runner), force=True) as file:
        file.write((json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
