"""Measure in OpenVINO, on this machine, how long graphs take, and what int8 gains in each matrix product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.extras import require
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.graphs.weights import write_graph
from gmmvit_deploy.graphs.wiring import inner_shape, stored
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.measure.turns import seconds_in_turn, time_ratio
from gmmvit_deploy.runtimes.programs.openvino import read_graph

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray


_TIMES = 2
"""The profile of single kernels takes so many times as long as the ratio of two programs."""


def relative_time(plain: ir.Model, other: ir.Model, batch: NDArray[Any]) -> float:
    """Return the time of a graph divided by that of the float32 graph, as runners and servers run them.

    batch: the inputs (B, …) of each run.
    Errors: MissingDependencyError when OpenVINO is not installed.
    """
    require("openvino", package="openvino", extra="openvino")
    with temporary_folder("graphs") as folder:
        for name, model in (("plain", plain), ("other", other)):
            write_graph(model, folder / f"{name}.onnx")
        programs = [OpenVinoProgram(folder / f"{name}.onnx", hint="f32") for name in ("plain", "other")]
        return 1 / time_ratio(*(partial(program.run, batch) for program in programs)).value


def projection_gains(
    plain: ir.Model, quantized: ir.Model, projections: Sequence[ir.Node], batch: NDArray[Any]
) -> dict[str, float]:
    """Return the name of each projection → its milliseconds in the float32 graph minus those in the int8 graph.

    A projection includes what OpenVINO computes in the same kernel: bias, activation, and quantisation. Those of the
    same shape get the median of their differences, because other programs disturb a single one.
    projections: nodes of the float32 graph.  batch, errors: as in `relative_time`.
    """
    graphs = [_Profiled(model, batch) for model in (plain, quantized)]
    seconds_in_turn([graph.run for graph in graphs], times=_TIMES)
    owners: dict[str, str] = {}
    for node in projections:
        owner, readers = str(node.name), node.outputs[0].consumers()
        additions = (str(reader.name) for reader in readers if reader.op_type == "Add")
        owners |= dict.fromkeys((owner, f"{owner}/QuantizeLinear", *additions), owner)
    before, after = (graph.milliseconds_of(owners) for graph in graphs)
    differences = {name: before[name] - after[name] for name in before if name in after}
    shapes = {str(node.name): _shape(node) for node in projections}
    alike: dict[Any, list[float]] = defaultdict(list)
    for name, difference in differences.items():
        alike[shapes[name]].append(difference)
    default = median(differences.values()) if differences else 0.0  # for a projection that OpenVINO renamed
    return {name: median(alike.get(shape, [default])) for name, shape in shapes.items()}


def _shape(projection: ir.Node) -> Any:
    return stored(projection.inputs[1]).shape, inner_shape(projection.outputs[0])


class _Profiled:
    """A graph that OpenVINO runs with a profile of its kernels."""

    def __init__(self, graph: ir.Model, batch: NDArray[Any]) -> None:
        openvino = require("openvino", package="openvino", extra="openvino")
        with temporary_folder("graph") as folder:
            write_graph(graph, folder / "model.onnx")
            model = read_graph(folder / "model.onnx")
            shape = model.inputs[0].partial_shape
            shape[0] = len(batch)
            model.reshape(shape)
            settings = {
                "INFERENCE_PRECISION_HINT": "f32",
                "NUM_STREAMS": "1",
                "INFERENCE_NUM_THREADS": str(cores()),
                "PERF_COUNT": True,
            }
            self._compiled = openvino.Core().compile_model(model, "CPU", settings)
        self._request, self._batch = self._compiled.create_infer_request(), batch
        self._times: dict[str, list[float]] = {}

    def run(self) -> None:
        self._request.infer({0: self._batch})
        for kernel in self._request.get_profiling_info():
            self._times.setdefault(kernel.node_name, []).append(kernel.real_time.total_seconds() * 1e3)

    def milliseconds_of(self, owners: dict[str, str]) -> dict[str, float]:
        """Return name of a projection → the minimum milliseconds of its kernels in a run.

        owners: ONNX node → its projection. A kernel of nodes of several projections counts in equal parts; a
        quantisation in the kernel of another projection, such as after GELU, belongs to that projection.
        """
        totals: dict[str, float] = defaultdict(float)
        for kernel in self._compiled.get_runtime_model().get_ordered_ops():
            times = self._times.get(kernel.get_friendly_name(), [0.0])
            names = kernel.get_rt_info()["originalLayersNames"].astype(str).split(",")
            mine = [name for name in names if name in owners]
            projections = {owners[name] for name in mine if not name.endswith("/QuantizeLinear")}
            if not projections and len(mine) == len(names):
                projections = {owners[name] for name in mine}
            for projection in projections:
                totals[projection] += min(times) / len(projections)
        return totals
