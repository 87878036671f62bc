"""One small interface for everything that can turn a batch into logits, and for what else it can do.

Whoever uses a runner asks it: never which class it is of, nor what it is called.

    graph          which graph of the bundle it was made from            localize, preprocessing
    inspectable    the graph that runs, with its inner values            localize
    server         the models of a server, and the connection to it      served, preprocessing, waterfall
    provenance     what exactly runs: hashes, versions, settings         reports, run cards
    callers        number of concurrent calls it can make use of         load
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.precision import Precision
    from gmmvit_deploy.runtime.triton import TritonConnection
    from gmmvit_deploy.variants import Variant

__all__ = ["Device", "InspectableGraph", "Inspection", "Runner", "Served"]

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InspectableGraph:
    """A graph whose inner values can be read.

    name: for reports.  proto: its nodes are named after the model's modules.
    values: (inputs, names of tensors) → name → value, always with ``logits``. A tensor that the runtime did not keep
    is left out. Without names the graph runs unchanged.
    """

    name: str
    proto: ModelProto
    values: Callable[[NDArray[Any], Sequence[str]], Mapping[str, NDArray[Any]]]


class Inspection(NamedTuple):
    """graph: the readable graph, or None.  why_not: reason why it is not the graph that runs; else empty."""

    graph: InspectableGraph | None
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The models of a server.  network: what the runner calls; ensemble: from encoded images; preprocess: its first.

    other_bundle: what is wrong where the server serves another bundle; empty otherwise.
    """

    connection: TritonConnection
    network: str
    ensemble: str
    preprocess: str
    other_bundle: str


class Runner:
    """``run(batch) -> logits``.  Abstract; used as a context manager.

    A batch is what the bundle's graph takes: uint8 (B, height, width, channels) for ``pixels``,
    float32 (B, channels, height, width) for ``tensor``. Logits are float32 (B, C).

    precision: what it computes in, which says how near to float32 it can come.  device: where it does so.
    needs_own_thread: it must not be called from a callback of compiled code.
    callers: number of concurrent calls that it can make use of.
    graph: the bundle's file that its program was made from; None where there is no such file or it is not known.
    server: the models of its server; None for a runner in this process.
    runtime: the product that computes, for messages; empty where its name is enough.
    own_kernels: whether our CPU kernels are in the graph that it runs.
    """

    name: str
    precision: Precision = "fp32"
    device: Device = "cpu"
    needs_own_thread: bool = False
    callers: int = 1
    graph: Variant | None = None
    server: Served | None = None
    runtime: str = ""
    own_kernels: bool = False

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

    @property
    def label(self) -> str:
        """``openvino:bf16``; float32 goes without saying."""
        return self.name if self.precision == "fp32" else f"{self.name}:{self.precision}"

    def provenance(self) -> dict[str, str]:
        """Name → value: what runs, by hash, and the settings that it runs with."""
        return {**self._program_provenance(), **self.settings}

    def _program_provenance(self) -> dict[str, str]:
        raise NotImplementedError

    def inspectable(self) -> Inspection:
        """The graph that runs, or another of the bundle that stands in for it; or neither, with the reason."""
        return Inspection(None, f"{self.name} has no graph that could be read")

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
                f"expected a batch of {self.input_dtype} (B, {', '.join(map(str, self.input_shape))}), "
                f"got {batch.dtype} {tuple(batch.shape)}"
            )
        if not self.takes(batch.shape[0]):
            raise InputError(
                f"batch {batch.shape[0]} is outside this bundle's 1..{self.max_batch}",
                hint="split it, or export again with a larger --max-batch",
            )
