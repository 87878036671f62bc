"""The options of a choice.  Imports no PyTorch, so that a wrong value is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from gmmvit_deploy.arguments import Refusals, require_counts, require_known, require_number
from gmmvit_deploy.bundle.choices import Goal
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.runtimes.programs.image_batches import require_source


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeOptions:
    """Options of a choice.

    Example: ``OptimizeOptions(data="folder:val", calibration="folder:train")``.

    data: the images that judge, as in `ParityOptions`.  source: its text as typed, unless ``data`` is this text.
    limit: the number of images to use, spread evenly over the data.
    calibration: the images that set the ranges of static int8, as in `open_images`; None leaves static int8 out.
    gate: the share to reach: of PyTorch's accuracy if the images have labels, else of the decisions; None uses int8's.
    For a bundle without logits, of the nearest neighbours of the features; None uses `neighbours.KEEP_NEIGHBOURS`.
    keep_decisions: the share of the decisions to keep, also if the images have labels; not with ``gate``.
    goal: ``latency`` for a batch of 1, ``throughput`` for a batch of `BATCH`, unless ``batch`` is another number.
    """

    data: Images | Path | str
    source: str = ""
    limit: int = 500
    calibration: str | None = None
    gate: float | None = None
    keep_decisions: float | None = None
    goal: Goal = "latency"
    batch: int | None = None

    def __post_init__(self) -> None:
        refusals = Refusals()
        with refusals.collected():
            if isinstance(self.data, str | Path):
                object.__setattr__(self, "source", self.source or str(self.data))
                object.__setattr__(self, "data", open_data(str(self.data)))
        with refusals.collected():
            if self.calibration is not None:
                require_source(self.calibration)
        with refusals.collected():
            if self.gate is not None and self.keep_decisions is not None:
                raise InputError("gate and keep_decisions are two gates, and one decides", hint="leave one of them out")
            for name, share in (("gate", self.gate), ("keep_decisions", self.keep_decisions)):
                require_number(name, share, "a share below 1, such as 0.99", lambda value: 0 < value < 1)
        with refusals.collected():
            require_known("goal", self.goal, get_args(Goal))
            require_counts(limit=self.limit, batch=self.batch)
        refusals.raise_all()

    @property
    def images(self) -> Images:
        """``data``, opened."""
        return cast(Images, self.data)
