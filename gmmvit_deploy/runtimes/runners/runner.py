"""The interface of every runner: compute the logits of a batch, and describe the program that computes the logits.

A runner is a runtime, engine or server. Other modules use the following members, and never test a runner's class or
name:

    member         content                                               used by (module)
    graph          the bundle's graph that the program was made from     parity.localize, parity.preprocessing
    inspectable    the graph that runs, with readable inner tensors      parity.localize
    server         the models of a server, and the connection to it      parity.served, bench.waterfall
    provenance     hashes, versions and settings of the program          reports, run cards
    callers        number of calls that run in parallel                  bench.cells
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.precision import SPECS, Form
from gmmvit_deploy.inference.runner_name import RunnerName

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.cascades import CascadeRecord
    from gmmvit_deploy.bundle.variants import Variant
    from gmmvit_deploy.inference.precision import Precision
    from gmmvit_deploy.models.specs import OutputName
    from gmmvit_deploy.runtimes.programs.triton import TritonConnection


Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InspectableGraph:
    """A graph whose inner tensors can be read.

    name: name of the graph in reports.  model: the graph; the nodes are named after the model's modules.
    values: a function of a batch and of names of tensors, which it adds to the graph's outputs; returns name → array,
    always with ``logits``, and without tensors that the runtime optimised away.
    """

    name: str
    model: ir.Model
    values: Callable[[NDArray[Any], Sequence[str]], Mapping[str, NDArray[Any]]]


class Inspection(NamedTuple):
    """The result of `Runner.inspectable`.

    graph: the graph that the runner runs, or another of the bundle in its place; None without one.
    why_not: why the graph that runs cannot be inspected; "" if ``graph`` is that graph.
    """

    graph: InspectableGraph | None
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The models of a bundle on a server.

    network: the model that the runner calls.  ensemble: takes encoded images.  preprocess: the ensemble's first step.
    other_bundle: message about the mismatch if the server serves another bundle; otherwise empty.
    output: the name of the bundle's first output.
    """

    connection: TritonConnection
    network: str
    ensemble: str
    preprocess: str
    other_bundle: str
    output: OutputName = "logits"

    def infer(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the first output, float32 (B, C), for encoded images, an array (B, 1) of bytes objects."""
        return self.connection.infer(self.ensemble, "IMAGE", images, output=self.output)


class Runner:
    """Computes the logits of a batch: ``run(batch) -> logits``.  Abstract; used as a context manager.

    A batch is an input of the bundle's graph: uint8 (B, height, width, channels) if the bundle's input is ``pixels``,
    float32 (B, channels, height, width) if the input is ``tensor``. Logits are float32 (B, C). For a bundle without
    logits, the features (B, D) take the place of the logits.

    needs_own_thread: True if the runner must be called in a thread of its own, because it fails when native code, such
    as LoadGen, calls it back.
    callers: number of calls that the runner runs in parallel.
    graph: the bundle's graph that the program was made from; None if there is no such graph or the graph is unknown.
    form: the form of the int8 graph that runs on a CPU; "" for another graph.
    record: of a cascade, which computes nearly undecided images again in float32; `run_all` then also gives
    ``deferred`` (B, 1), bool; None for another runner.
    server: the models on the runner's server; None for a runner in this process.
    runtime: name of the runtime, for messages; empty if the runner's name is enough.
    judged: True while the caller judges the outputs, such as parity or bench (`judging`). Otherwise, the runner
    compares itself with the bundle's reference outputs before its first answer (`runners.right_outputs`).
    """

    name: str
    precision: Precision = "fp32"
    device: Device = "cpu"
    needs_own_thread: bool = False
    callers: int = 1
    graph: Variant | None = None
    server: Served | None = None
    runtime: str = ""
    form: Form = ""
    record: CascadeRecord | None = None
    judged: bool = False

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.input_shape = bundle.input_shape
        self.input_dtype = bundle.input_dtype
        self.max_batch = bundle.manifest.max_batch
        self.outputs = bundle.manifest.output_names
        self._process = os.getpid()
        self._proven: set[bool] = set()  # False: for an image alone; True: for a batch
        self._proving = threading.Lock()

    def run(self, batch: NDArray[Any]) -> NDArray[Any]:
        """Compute the float32 logits (B, C) of a batch.

        Errors: InputError when the bundle does not allow the shape, type or size of the batch, or in a forked process.
        RunnerUnavailableError when the runner does not give the bundle's reference outputs.
        """
        self._require(batch)
        return self._run(batch)

    def run_all(self, batch: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """Compute all outputs of the bundle for a batch: name of the output → float32 (B, …).  Errors: as `run`."""
        self._require(batch)
        return dict(zip(self.outputs, self.computed(batch), strict=True))

    def computed(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """Compute all outputs without any check, in the order of ``outputs``."""
        return [self._run(batch)] if len(self.outputs) == 1 else self._run_all(batch)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(minimum, maximum) batch size of each accepted range.  An engine has a range per optimisation profile."""
        return ((1, self.max_batch),)

    def takes(self, batch: int) -> bool:
        """Return True if the runner accepts batches of this size."""
        return any(smallest <= batch <= largest for smallest, largest in self.ranges)

    @property
    def settings(self) -> dict[str, str]:
        """Name → value of the settings that affect the runner's speed, such as the number of threads."""
        return {}

    @property
    def runner_name(self) -> RunnerName:
        return replace(RunnerName.parse(self.name, self.precision), form=self.form, cascade=self.record is not None)

    @property
    def stages(self) -> tuple[Runner, ...]:
        """The runner, or those of which it consists."""
        return (self,)

    @property
    def kept_gate(self) -> float:
        """The share of PyTorch's decisions to keep; 1 for all that the limit of the logits decides."""
        return SPECS[self.precision].kept_gate if self.record is None else self.record.keep_decisions

    @property
    def label(self) -> str:
        """`runner_name` as text, such as ``openvino:bf16``."""
        return str(self.runner_name)

    def provenance(self) -> dict[str, str]:
        """Return name → value of the program's hashes, versions and settings, which identify the program."""
        return {**self._program_provenance(), **self.settings}

    def _program_provenance(self) -> dict[str, str]:
        raise NotImplementedError

    def inspectable(self) -> Inspection:
        """Return the graph that the runner runs, with readable inner tensors, or another in its place."""
        return Inspection(None, f"{self.name} has no graph to inspect")

    def rows(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Compute the logits of any number of inputs; rows are repeated to fill a batch of a size that is accepted."""
        import numpy as np

        return np.concatenate([self.run(fits)[:count] for fits, count in self._fitting(inputs)])

    def rows_all(self, inputs: NDArray[Any], *, batch: int | None = None) -> dict[str, NDArray[Any]]:
        """Compute all outputs of any number of inputs, as `rows` does: name → (N, …).  batch: None is ``max_batch``."""
        import numpy as np

        parts = [(self.run_all(fits), count) for fits, count in self._fitting(inputs, batch)]
        return {name: np.concatenate([answers[name][:count] for answers, count in parts]) for name in parts[0][0]}

    def _fitting(self, inputs: NDArray[Any], batch: int | None = None) -> Iterator[tuple[NDArray[Any], int]]:
        """Yield (batch of an accepted size, number of rows that are inputs)."""
        import numpy as np

        size = batch or self.max_batch
        for start in range(0, len(inputs), size):
            part = inputs[start : start + size]
            fits = np.resize(part, (self.fitting(len(part)), *part.shape[1:]))
            yield fits, len(part)

    def fitting(self, batch: int) -> int:
        """Return the smallest size of a batch that the runner accepts, from ``batch`` on."""
        return batch if self.takes(batch) else min(size for size, _ in self.ranges if size >= batch)

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        raise NotImplementedError

    def _run_all(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """Compute the outputs of a bundle with several outputs, in their order."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the runner's resources."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require(self, batch: NDArray[Any]) -> None:
        self._check(batch)
        if os.getpid() != self._process:
            raise InputError(
                f"runner {self.label} was opened in process {self._process}, of which process {os.getpid()} is a fork; "
                "the runtime's threads are not in a forked process, so that it would wait for them forever",
                hint="start processes with multiprocessing.get_context('spawn'), and open a runner in each",
            )
        if self.judged:
            return
        from gmmvit_deploy.runtimes.runners.right_outputs import require_right_outputs

        several = len(batch) > 1
        with self._proving:  # threads that call at the same time wait for the proof
            if several not in self._proven:
                require_right_outputs(self, several=several)
                self._proven.add(several)

    def _check(self, batch: NDArray[Any]) -> None:
        if str(batch.dtype) != self.input_dtype or tuple(batch.shape[1:]) != self.input_shape:
            raise InputError(
                f"expected a batch of {self.input_dtype} (B, {', '.join(map(str, self.input_shape))}), "
                f"got {batch.dtype} {tuple(batch.shape)}"
            )
        if not self.takes(batch.shape[0]):
            raise InputError(
                f"expected a batch of 1..{self.max_batch} images, got {batch.shape[0]}",
                hint="split the batch, or export the checkpoint again with a larger --max-batch",
            )


@contextmanager
def judging(runners: Sequence[Runner]) -> Iterator[None]:
    """Inside the block, the caller judges every output of the runners, so that they do not compare themselves."""
    runners = [stage for runner in runners for stage in runner.stages]
    before = [runner.judged for runner in runners]
    for runner in runners:
        runner.judged = True
    try:
        yield
    finally:
        for runner, judged in zip(runners, before, strict=True):
            runner.judged = judged
