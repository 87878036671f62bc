"""One small interface for everything that can turn a batch into logits."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.precision import Precision

__all__ = ["Device", "Runner"]

Device = Literal["cpu", "gpu"]


class Runner:
    """``run(batch) -> logits``.  Abstract; used as a context manager.

    A batch is what the bundle's graph takes: uint8 (B, height, width, channels) for ``pixels``,
    float32 (B, channels, height, width) for ``tensor``. Logits are float32 (B, C).

    precision: what it computes in, which says how near to float32 it can come.  device: where it does so.
    needs_own_thread: it must not be called from a callback of compiled code.
    """

    name: str
    precision: Precision = "fp32"
    device: Device = "cpu"
    needs_own_thread: bool = False

    def __init__(self, bundle: Bundle) -> None:
        self.input_shape = bundle.input_shape
        self.input_dtype = bundle.input_dtype
        self.max_batch = bundle.manifest.max_batch
        self.classes = bundle.manifest.spec.classes

    def run(self, batch: NDArray[Any]) -> NDArray[Any]:
        """Logits for a batch.

        Errors: InputError on a batch of another shape, type or size than the bundle states.
        """
        self._check(batch)
        return self._run(batch)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(smallest, largest) batch of each range it runs: one, or one for each optimisation profile."""
        return ((1, self.max_batch),)

    def takes(self, batch: int) -> bool:
        """Whether it runs a batch of this size."""
        return any(least <= batch <= most for least, most in self.ranges)

    @property
    def settings(self) -> dict[str, str]:
        """What decides how fast it is beside the program itself: name → value."""
        return {}

    def rows(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Logits for any number of inputs, in the largest batches it takes.

        What is left over for the last batch is filled up with repeated rows where no smaller batch is taken.
        """
        import numpy as np

        size = self.max_batch
        parts = []
        for start in range(0, len(inputs), size):
            part = inputs[start : start + size]
            fits = part if self.takes(len(part)) else np.resize(part, (self._next_size(len(part)), *part.shape[1:]))
            parts.append(self.run(fits)[: len(part)])
        return np.concatenate(parts)

    def _next_size(self, batch: int) -> int:
        return min(least for least, _ in self.ranges if least >= batch)

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the runner holds."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, batch: NDArray[Any]) -> None:
        if str(batch.dtype) != self.input_dtype or tuple(batch.shape[1:]) != self.input_shape:
            raise InputError(
                f"a batch of {self.input_dtype} (B, {', '.join(map(str, self.input_shape))}) was wanted, "
                f"found {batch.dtype} {tuple(batch.shape)}"
            )
        if not self.takes(batch.shape[0]):
            raise InputError(
                f"batch {batch.shape[0]} is outside this bundle's 1..{self.max_batch}",
                hint="split it, or export again with a larger --max-batch",
            )
