"""Which operators take the time inside a runtime?

The profiler of each runtime measures the operators of the paper's models and of the systems of
`benchmarks/shared/systems.py`. The programs are those of the runner `openvino+kernels` (float32, bf16 and int8), and
the plain export in OpenVINO (`straight openvino`). The input is a single image, or a chunk into which the runner
divides a batch; for the plain export, a whole batch. A single thread runs, so that no operator waits for another core;
a single image is also measured on all cores. The median time of each operator is summed by kind:

    products    linear maps and convolutions, with the operators that are fused with them: bias, GELU, quantisation; in
                our operator of several int8 products, also the residuals and norms between them
    attention   Q Kᵀ, softmax and P V, with the mask if a single kernel of ours or of OpenVINO computes all of these
    mask        the multiplication by the mask, if a separate operator computes it; in the plain export, whose operators
                have no names of modules, it is in attention or in rest
    layout      transposes, splits, copies
    norms       LayerNorm; our kernel also computes the residual before the norm and the quantisation after it
    rest        separate residuals, GELU, quantisation and pooling

The cost of the mask is the time of attention and mask, minus the time of attention in the plain model. The time of the
products is compared with the best rate on the shapes of the model, measured on all cores and divided by their number.

    python benchmarks/where_time_goes.py [--family vit …] [--runs 40] [--check] [--output FILE]
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks.shared import run_card
from benchmarks.shared.cpu_programs import HAS_BF16, required_kernels, runner_of
from benchmarks.shared.families import graphs_of, pair
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.places import result_of
from benchmarks.shared.systems import MEASURED, SYSTEMS
from gmmvit_deploy.bench.roofline import measured_roofline, work_of_graph
from gmmvit_deploy.extras import require
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.openvino_program import CHUNK, OpenVinoProgram
from gmmvit_deploy.inference.precision import SPECS, Precision
from gmmvit_deploy.models.specs import input_shape

KINDS = ("products", "attention", "mask", "layout", "norms", "rest")
_BATCH = 64
_CORES = cores()
_WITH_WEIGHTS = {"FullyConnected", "FullyConnectedQuantizedLegacy", "Convolution", "GroupConvolution"}
_OF_ATTENTION = {"Reference", "MatMul", "Softmax"}
"""OpenVINO's names of our kernels, of a product of two computed tensors, and of a softmax."""
_LAYOUT = {"Transpose", "Split", "VariadicSplit", "Concat", "Gather", "Reshape", "Reorder", "Convert", "Slice"}
_NORMS = {"LayerNormalization", "SkipLayerNormalization", "MVN"}
_INSIDE_ATTENTION = re.compile(r"attention(\.inner)?(\.scores(\.\w+)*)?/")

Operators = dict[tuple[str, str], list[float]]
"""(name of the node, its operator) → ms of each run."""


def kind_of(node: str, operator: str) -> str:
    if node.endswith("/ProductChain"):
        return "products"
    if operator in _LAYOUT:
        return "layout"
    if operator in _NORMS or node.endswith("/LayerNormalization"):
        return "norms"
    if operator == "Mul" and ".mask/" in node:
        return "mask"
    if operator in _OF_ATTENTION or _INSIDE_ATTENTION.search(node):
        return "attention"
    return "products" if operator in _WITH_WEIGHTS else "rest"


def in_openvino(
    path: Path, images: np.ndarray, runs: int, precision: Precision, *, kernels: bool, threads: int
) -> Operators:
    openvino = require("openvino", package="openvino", extra="openvino")
    hint = SPECS[precision].openvino
    ours = required_kernels(path, precision) if kernels else None
    # As the runner does: the operations are chosen before the batch is fixed.
    program = OpenVinoProgram(str(path), hint=hint, threads=threads, kernels=ours)
    model = program.model(len(images), shared=len(images) == 1).clone()
    model.reshape(list(images.shape))
    core = openvino.Core()
    settings = {**program.settings(model, 1), "PERF_COUNT": True}
    compiled = core.compile_model(model, "CPU", settings)
    # A subgraph is a generated kernel of several operators.
    with_softmax = {
        node.get_friendly_name()
        for node in compiled.get_runtime_model().get_ordered_ops()
        if "softmax" in node.get_rt_info()["originalLayersNames"].astype(str).lower()
    }
    request = compiled.create_infer_request()
    operators: Operators = defaultdict(list)
    for _ in range(runs):
        for _ in range(3):  # the threads of a program that has waited are asleep, and its caches are cold
            request.infer({0: images})
        for operator in request.profiling_info:  # of the last inference
            if operator.real_time:
                kind = "Softmax" if operator.node_name in with_softmax else operator.node_type
                operators[operator.node_name, kind].append(operator.real_time.total_seconds() * 1e3)
    return operators


def joined(operators: Operators) -> dict[str, float]:
    """Return kind → ms of a run.  Medians over the runs exclude the first runs, which fill caches."""
    spent = dict.fromkeys(KINDS, 0.0)
    for (node, operator), times in operators.items():
        spent[kind_of(node, operator)] += float(np.median(times))
    return spent


def product_operations(graph: ir.Model, rows: int) -> int:
    """Return the number of operations of the products with weights, for a batch of ``rows``."""
    products = work_of_graph(graph, rows).products
    return sum(2 * int(np.prod(shape)) * times for shape, times in products.items())


STRAIGHT = "straight openvino"
PROGRAMS: dict[str, Precision] = {
    STRAIGHT: "fp32",
    "openvino+kernels": "fp32",
    "openvino+kernels:bf16": "bf16",
    "openvino+kernels:int8": "int8",
}
"""Name of the runner → its precision."""


def family(name: str, names: Sequence[str] | None, runs: int, folder: Path) -> dict[str, Any]:
    models = pair(name)
    image_shape = input_shape(models["trained"].spec)
    chosen = {
        program: precision
        for program, precision in PROGRAMS.items()
        if program in (names or PROGRAMS) and (precision != "bf16" or HAS_BF16)
    }
    graphs = graphs_of(name, dict.fromkeys([*models, *map(graph_of, chosen)]), max_batch=_BATCH)
    for key, graph in graphs.items():
        ir.save(graph, folder / f"{key}.onnx")
    results: dict[str, Any] = {"programs": {}}
    for program, precision in chosen.items():
        line = measured_roofline([work_of_graph(graphs["trained"], CHUNK)], precision)
        gflops = line.best.gflops / _CORES if line else float("nan")
        runner, sizes = program, (1, _BATCH)
        if program != STRAIGHT:
            runner, _ = runner_of(folder / f"{graph_of(program)}.onnx", program, precision)
            sizes = (1, CHUNK)
        rows = {}
        for size in sizes:
            images = np.random.default_rng(0).standard_normal((size, *image_shape), dtype=np.float32)
            rows[str(size)] = chunk_of(runner, precision, folder, graphs, images, runs, gflops)
        results["programs"][runner] = {"precision": precision, "gflops_a_core": gflops, "rows": rows}
    return results


def graph_of(program: str) -> str:
    """Return the name of the graph that a program runs, as for `graphs_of`."""
    if program == STRAIGHT:
        return "straight"
    return "int8_cpu" if program.endswith(":int8") else "trained"


def chunk_of(
    program: str,
    precision: Precision,
    folder: Path,
    graphs: dict[str, ir.Model],
    images: np.ndarray,
    runs: int,
    gflops: float,
) -> dict[str, Any]:
    """Return the times of a chunk.

    graphs: name → graph, as for `graphs_of`; ``plain`` is absent if a system has no plain twin.

    ms: the total.  spent_ms: the time of each kind.  products_at_best_ms: the time of the products at the best rate.
    all_cores_ms: as spent_ms, on all cores; only of a single image.
    mask_ms: the cost of the mask; absent without a plain model, and for int8 and the plain export, for which the script
    has no plain model.
    """

    def spent_in(graph: str, threads: int = 1) -> dict[str, float]:
        path, kernels = folder / f"{graph}.onnx", "+kernels" in program
        return joined(in_openvino(path, images, runs, precision, kernels=kernels, threads=threads))

    spent = spent_in(graph_of(program))
    least = product_operations(graphs["trained"], len(images)) / gflops / 1e6
    chunk = {"ms": sum(spent.values()), "spent_ms": spent, "products_at_best_ms": least}
    if len(images) == 1:
        chunk["all_cores_ms"] = spent_in(graph_of(program), _CORES)
    if program != STRAIGHT and precision != "int8" and "plain" in graphs:
        plain = spent_in("plain")
        chunk["mask_ms"] = spent["attention"] + spent["mask"] - plain["attention"] - plain["mask"]
    return chunk


def print_chunk(name: str, program: str, rows: str, chunk: dict[str, Any]) -> None:
    shares = ", ".join(f"{kind} {ms / chunk['ms']:.0%}" for kind, ms in chunk["spent_ms"].items() if ms)
    reached = chunk["products_at_best_ms"] / chunk["spent_ms"]["products"]
    print(f"{name}, {program}, {rows} rows: {chunk['ms']:.2f} ms: {shares}; products at {reached:.0%} of the best rate")
    if "all_cores_ms" in chunk:
        total, of_kinds = sum(chunk["all_cores_ms"].values()), chunk["all_cores_ms"]
        factors = (f"{kind} {ms / chunk['spent_ms'][kind]:.2f}" for kind, ms in of_kinds.items() if ms)
        print(f"    on all cores: {total:.2f} ms; time over that of a single thread: {', '.join(factors)}")
    if "mask_ms" in chunk:
        print(f"    cost of the mask: {chunk['mask_ms']:+.3f} ms, {chunk['mask_ms'] / chunk['ms']:+.1%}")


def profiled(name: str, programs: Sequence[str] | None, runs: int) -> dict[str, Any]:
    """Return the result of `family`, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        results = family(name, programs, runs, Path(folder))
    for program, measured in results["programs"].items():
        for rows, chunk in measured["rows"].items():
            print_chunk(name, program, rows, chunk)
    return results


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--family", choices=MEASURED, action="append", help="only this model; may be repeated")
    parser.add_argument(
        "--program", action="append", help="only this program, such as openvino+kernels:int8; may be repeated"
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--systems-output", type=Path, default=result_of(__file__, suffix=""))
    arguments = parsed(parser, family=["vit"], program=["openvino+kernels"], runs=2)
    chosen = arguments.family or MEASURED
    families = [name for name in chosen if name not in SYSTEMS]
    if families:
        with run_card.written(arguments.output, "where_time_goes.py", runs=arguments.runs) as results:
            results["families"] = {name: profiled(name, arguments.program, arguments.runs) for name in families}
    for name in (name for name in chosen if name in SYSTEMS):
        output = arguments.systems_output / f"{name}.json"
        with run_card.written(output, "where_time_goes.py", family=name, runs=arguments.runs) as results:
            results["size"] = SYSTEMS[name].size
            results["families"] = {name: profiled(name, arguments.program, arguments.runs)}


if __name__ == "__main__":
    main()
