"""The options of a parity run."""

from __future__ import annotations

from dataclasses import dataclass

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.parity.inputs import OnBroken

BATCH = max(16, 2 * cores())
"""The number of images in the batches that are judged beside single images, as `gmmvit optimize` times them. With fewer
than two images a core, all cores share each image, as they share a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOptions:
    """Options of a parity run.

    data: the real images, or None.  limit: the number of images to use, spread evenly over the data; None uses all.
    on_broken: ``fail`` ends the run at a broken image; ``skip`` leaves broken images out.
    gate: the share of PyTorch's top-1 that the runner must reach; None uses that of its precision, as MLPerf's.
    keep_decisions: the share of the images whose decision a runner must keep; None uses that of its precision.
    snr_db: the minimum signal-to-noise ratio of a runner's logits, or None.
    least_cosine: the minimum cosine of an image's features, or of its logits if there are none, not centred; or None.
    expected_accuracy: the accuracy that training measured on such images, which PyTorch must reach; None if unknown.
    other_preprocessings: False does not look for a preprocessing with which PyTorch is more accurate.
    localize: True also measures the error of each block.
    batch: the size of the batches in which each runner computes all inputs, beside the smallest that it takes.
    """

    data: Images | None = None
    limit: int | None = None
    on_broken: OnBroken = "fail"
    gate: float | None = None
    keep_decisions: float | None = None
    snr_db: float | None = None
    least_cosine: float | None = None
    expected_accuracy: float | None = None
    other_preprocessings: bool = True
    localize: bool = False
    batch: int = BATCH

    def __post_init__(self) -> None:
        if self.gate is not None and not 0 < self.gate <= 1:
            raise InputError(f"--gate: expected a share of PyTorch's accuracy, such as 0.999, got {self.gate}")
        for option, share in (("keep-decisions", self.keep_decisions), ("expect-accuracy", self.expected_accuracy)):
            # No number of images shows that all keep their decision.
            if share is not None and not (0 < share < 1 or (share == 1 and option == "expect-accuracy")):
                raise InputError(f"--{option}: expected a share of the images, such as 0.97, got {share}")
        if self.snr_db is not None and not 0 < self.snr_db < 200:
            raise InputError(f"--snr-db: expected dB, such as 20, got {self.snr_db}")
        if self.least_cosine is not None and not 0 < self.least_cosine < 1:
            raise InputError(f"--least-cosine: expected a cosine, such as 0.98, got {self.least_cosine}")
        if self.on_broken not in ("fail", "skip"):
            raise InputError(f"--on-broken: expected fail or skip, got {self.on_broken!r}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit: expected at least 1, got {self.limit}")
