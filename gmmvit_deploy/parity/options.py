"""The options of a parity run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from gmmvit_deploy.arguments import Refusals, require_counts, require_known, require_number
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.parity.inputs import OnBroken

BATCH = max(16, 2 * cores())
"""The number of images in the batches that are judged beside single images, as `gmmvit optimize` times them. With fewer
than two images a core, all cores share each image, as they share a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOptions:
    """Options of a parity run.

    Example: ``ParityOptions(data="folder:val", limit=500)``.

    data: the real images, as a text such as ``folder:val`` or a path (`images.data.open_data`), or opened; or None.
    limit: the number of images to use, spread evenly over the data; None uses all.
    on_broken: ``fail`` ends the run at a broken image; ``skip`` leaves broken images out.
    gate: the share of PyTorch's top-1 that the runner must reach; None uses that of its precision, as MLPerf's.
    keep_decisions: the share of the images whose decision a runner must keep; None uses that of its precision.
    keep_neighbours: the share of the nearest neighbours that a runner's features must keep (`neighbours`); None judges
    networks without logits by `KEEP_NEIGHBOURS`, but for float32, and no others.
    snr_db: the minimum signal-to-noise ratio of a runner's logits, or None.
    least_cosine: the minimum cosine of an image's features, or of its logits if there are none, not centred; or None.
    expected_accuracy: the accuracy that training measured on such images, which PyTorch must reach; None if unknown.
    other_preprocessings: False does not look for a preprocessing with which PyTorch is more accurate.
    numeric_images: the number of images on which all checks judge float32, int8 and fp8; None is all. On the others,
    float32 is not judged, and int8 and fp8 only by the decisions, right answers and neighbours that a gate counts,
    beside PyTorch's in float32.
    localize: True also measures the error of each block.
    batch: the size of the batches in which each runner computes all inputs, beside the smallest that it takes.
    """

    data: Images | Path | str | None = None
    limit: int | None = None
    on_broken: OnBroken = "fail"
    gate: float | None = None
    keep_decisions: float | None = None
    keep_neighbours: float | None = None
    snr_db: float | None = None
    least_cosine: float | None = None
    expected_accuracy: float | None = None
    other_preprocessings: bool = True
    numeric_images: int | None = None
    localize: bool = False
    batch: int = BATCH

    def __post_init__(self) -> None:
        refusals = Refusals()
        with refusals.collected():
            if isinstance(self.data, str | Path):
                object.__setattr__(self, "data", open_data(str(self.data)))
        share = "a share of the images, such as 0.97"
        for name, expected, holds in (
            ("gate", "a share of PyTorch's accuracy, such as 0.999", lambda value: 0 < value <= 1),
            ("keep_decisions", share, lambda value: 0 < value < 1),  # no number of images shows that all keep theirs
            ("keep_neighbours", "a share of the neighbours, such as 0.9", lambda value: 0 < value < 1),
            ("expected_accuracy", share, lambda value: 0 < value <= 1),
            ("snr_db", "dB, such as 20", lambda value: 0 < value < 200),
            ("least_cosine", "a cosine, such as 0.98", lambda value: 0 < value < 1),
        ):
            with refusals.collected():
                require_number(name, getattr(self, name), expected, holds)
        with refusals.collected():
            require_known("on_broken", self.on_broken, get_args(OnBroken))
        with refusals.collected():
            require_counts(limit=self.limit, numeric_images=self.numeric_images, batch=self.batch)
        refusals.raise_all()

    @property
    def images(self) -> Images | None:
        """``data``, opened."""
        return cast("Images | None", self.data)
