"""Where does the time go inside a runtime, and what would it take to be faster still?

Each runtime's own profiler measures operators on the models of the paper as its released code names them: the float32
graph in ONNX Runtime and OpenVINO, the same graph in OpenVINO's bf16, and the Q/DQ graph in OpenVINO, all with our
kernels, as the runners `onnxruntime+kernels` and `openvino+kernels` run them. Inputs are a single image, and a chunk of
the size into which these runners divide a batch; a single thread, so that no operator waits for another core. The
median of each operator over the runs is summed by kind:

    products    with weights, and the operators fused into them: bias, GELU, quantising
    attention   Q Kᵀ, softmax and P V; with the mask if a single kernel computes all of it: our own, or OpenVINO's
    mask        the multiplication by the mask if it is a separate operator
    layout      transposes, splits, copies
    norms       LayerNorm; our own kernel includes the residual before it and the quantising after it
    rest        separate residuals, GELU and quantising, pooling

The cost of the mask is the time of attention and mask, less the plain twin's time of attention.

Products are compared with the best rate on the model's own shapes, measured on all cores and divided by their number.
From it follows what a target would require: the time left for all other operators if products reached that rate.

    python benchmarks/reported/where_time_goes.py [--family vit] [--runs 40]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.shared.cpu_programs import required_fused_graph, required_kernels
from benchmarks.shared.families import FAMILIES, as_released, eager, graphs_of, pair
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import time_rounds
from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.bench.roofline import measured_roofline, work_of_graph
from gmmvit_deploy.extras import require
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.onnxruntime_program import ROWS_A_CORE
from gmmvit_deploy.runtime.openvino import OPENVINO_HINTS
from gmmvit_deploy.runtime.openvino_program import CHUNK
from gmmvit_deploy.specs import input_shape

KINDS = ("products", "attention", "mask", "layout", "norms", "rest")
TARGET = 5.0
"""Target speed-up over eager PyTorch at a batch of 64."""
_BATCH = 64
_CORES = len(os.sched_getaffinity(0))
_WITH_WEIGHTS = {"MatMul", "Gemm", "Conv", "FullyConnected", "FullyConnectedQuantizedLegacy", "Convolution"}
_LAYOUT = {"Transpose", "Split", "Concat", "Reshape", "Reorder", "ReorderOutput", "ReorderInput", "Convert", "Slice"}
_NORMS = {"LayerNormalization", "SkipLayerNormalization", "MVN"}
_INSIDE_ATTENTION = re.compile(r"attention(\.inner)?(\.scores(\.\w+)*)?/")

Operators = dict[tuple[str, str], list[float]]
"""(name of the node, its operator) → ms of each run."""


def kind_of(node: str, operator: str) -> str:
    if operator == "MaskedAttention":
        return "attention"
    if operator in _LAYOUT:
        return "layout"
    if operator in _NORMS or node.endswith("/LayerNormalization"):  # our kernel: OpenVINO calls it Reference
        return "norms"
    if operator == "Mul" and ".mask/" in node:
        return "mask"
    if _INSIDE_ATTENTION.search(node):
        return "attention"
    return "products" if operator in _WITH_WEIGHTS else "rest"


def in_onnxruntime(path: Path, images: np.ndarray, runs: int) -> Operators:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.intra_op_num_threads = 1
    options.profile_file_prefix = str(path.with_suffix(""))
    fused = required_fused_graph(path)
    options.register_custom_ops_library(str(fused.library))
    session = onnxruntime.InferenceSession(fused.graph, options, providers=["CPUExecutionProvider"])
    for _ in range(runs):
        session.run(None, {"tensor": images})
    operators: Operators = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            operators[name, event["args"]["op_name"]].append(event["dur"] / 1e3)
    return operators


def in_openvino(path: Path, images: np.ndarray, runs: int, precision: Precision) -> Operators:
    openvino = require("openvino", package="openvino", extra="openvino")
    core = openvino.Core()
    model = core.read_model(path)
    model.reshape(list(images.shape))
    kernels = required_kernels(path, precision)
    kernels.fuse_attention(model)
    if len(images) == CHUNK:  # as `OpenVinoProgram` does
        kernels.fuse_norms(model)
    settings = {
        "INFERENCE_PRECISION_HINT": OPENVINO_HINTS[precision],
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": "1",
        "PERF_COUNT": True,
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    operators: Operators = defaultdict(list)
    for _ in range(runs):
        request.infer({0: images})
        for operator in request.profiling_info:
            if operator.real_time:
                operators[operator.node_name, operator.node_type].append(operator.real_time.total_seconds() * 1e3)
    return operators


def joined(operators: Operators) -> dict[str, float]:
    """Return kind → ms of a run, by medians, on which the first runs, which fill caches, have no effect."""
    spent = dict.fromkeys(KINDS, 0.0)
    for (node, operator), times in operators.items():
        spent[kind_of(node, operator)] += float(np.median(times))
    return spent


def product_operations(proto: onnx.ModelProto, rows: int) -> int:
    """Return the operations of products with weights, for a batch of ``rows``."""
    products = work_of_graph(copy.deepcopy(proto), rows).products
    return sum(2 * int(np.prod(shape)) * times for shape, times in products.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A runtime and precision.  chunk: rows of a call in our runner.  profile: (graph, images, runs) → operators."""

    name: str
    precision: Precision
    chunk: int
    profile: Callable[[Path, np.ndarray, int], Operators]
    graph: str = "gmm"


IN_OPENVINO: dict[str, Precision] = {
    "openvino+kernels": "fp32",
    "openvino+kernels:bf16": "bf16",
    "openvino+kernels:int8": "int8",
}
PROGRAMS = (
    Program(name="onnxruntime+kernels", precision="fp32", chunk=ROWS_A_CORE, profile=in_onnxruntime),
    *(
        Program(
            name=name,
            precision=precision,
            chunk=CHUNK,
            profile=partial(in_openvino, precision=precision),
            graph="int8" if precision == "int8" else "gmm",
        )
        for name, precision in IN_OPENVINO.items()
    ),
)


def runs_here(program: Program) -> bool:
    return program.precision != "bf16" or "avx512_bf16" in cpu_features()


def family(name: str, names: Sequence[str] | None, runs: int, folder: Path) -> dict[str, Any]:
    models = pair(name)
    image_shape = input_shape(models["gmm"].spec)
    chosen = [program for program in PROGRAMS if runs_here(program) and program.name in (names or [program.name])]
    graphs = graphs_of(name, dict.fromkeys(["gmm", "plain", *(program.graph for program in chosen)]), max_batch=_BATCH)
    for key, graph in graphs.items():
        onnx.save(graph, folder / f"{key}.onnx")
    timed = time_rounds({"eager": eager(as_released(models["gmm"]))}, _BATCH, min(runs, 7), image_shape=image_shape)
    results: dict[str, Any] = {"eager_64_ms": float(np.median(timed.ms["eager"])), "programs": {}}
    rates: dict[str, float] = {}
    for program in chosen:
        if program.precision not in rates:
            line = measured_roofline([work_of_graph(copy.deepcopy(graphs["gmm"]), program.chunk)], program.precision)
            rates[program.precision] = line.best.gflops / _CORES if line else float("nan")
        gflops = rates[program.precision]
        rows = {}
        for size in (1, program.chunk):
            images = np.random.default_rng(0).standard_normal((size, *image_shape), dtype=np.float32)
            rows[str(size)] = chunk_of(program, folder, graphs["gmm"], images, runs, gflops)
        largest = rows[str(program.chunk)]
        largest["target"] = target_of(largest, results["eager_64_ms"] / TARGET, program.chunk)
        results["programs"][program.name] = {"precision": program.precision, "gflops_a_core": gflops, "rows": rows}
    return results


def chunk_of(
    program: Program, folder: Path, proto: onnx.ModelProto, images: np.ndarray, runs: int, gflops: float
) -> dict[str, Any]:
    """Return the times of a chunk.

    mask_ms: attention and mask, less the attention of the plain twin; absent for int8, which has no twin here.
    """
    spent = joined(program.profile(folder / f"{program.graph}.onnx", images, runs))
    least = product_operations(proto, len(images)) / gflops / 1e6
    chunk = {"ms": sum(spent.values()), "spent_ms": spent, "products_at_best_ms": least}
    if program.graph == "gmm":
        plain = joined(program.profile(folder / "plain.onnx", images, runs))
        chunk["mask_ms"] = spent["attention"] + spent["mask"] - plain["attention"] - plain["mask"]
    return chunk


def target_of(chunk: dict[str, Any], ms: float, rows: int) -> dict[str, float]:
    """Return the time of a chunk if all cores together took ``ms`` for a batch of 64, and what products leave of it."""
    budget = ms * rows * _CORES / _BATCH
    others = chunk["ms"] - chunk["spent_ms"]["products"]
    return {
        "chunk_ms": budget,
        "left_for_others_ms": budget - chunk["products_at_best_ms"],
        "others_ms": others,
    }


def print_chunk(name: str, program: str, rows: str, chunk: dict[str, Any]) -> None:
    shares = ", ".join(f"{kind} {ms / chunk['ms']:.0%}" for kind, ms in chunk["spent_ms"].items() if ms)
    reached = chunk["products_at_best_ms"] / chunk["spent_ms"]["products"]
    print(f"{name}, {program}, {rows} rows: {chunk['ms']:.2f} ms: {shares}; products at {reached:.0%} of the best rate")
    if "mask_ms" in chunk:
        print(f"    the mask: {chunk['mask_ms']:+.3f} ms, {chunk['mask_ms'] / chunk['ms']:+.1%}")
    if "target" in chunk:
        target = chunk["target"]
        print(
            f"    {TARGET:g} × eager at {_BATCH} is {target['chunk_ms']:.2f} ms a chunk: with products at best rate "
            f"{target['left_for_others_ms']:.2f} ms remain for all else, which takes {target['others_ms']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be repeated")
    parser.add_argument(
        "--program", action="append", help="only this program, such as openvino+kernels:int8; may be repeated"
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parser.parse_args()
    with run_card.written(arguments.output, "where_time_goes.py", runs=arguments.runs) as results:
        results["families"] = {}
        for name in arguments.family or FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                results["families"][name] = family(name, arguments.program, arguments.runs, Path(folder))
            for program, measured in results["families"][name]["programs"].items():
                for rows, chunk in measured["rows"].items():
                    print_chunk(name, program, rows, chunk)


if __name__ == "__main__":
    main()
