"""Would another setting of OpenVINO make a single image faster, and how much do two threads gain?

The script runs a single image in OpenVINO with our kernels: with the settings of our runner, twice for an A/A
comparison, and with one other setting each:

    one thread       a single thread instead of a thread per core
    threads apart    threads that the operating system may move to other cores
    latency          OpenVINO's hint PERFORMANCE_HINT=LATENCY
    snippets         without snippets, the kernels that OpenVINO generates; in bf16, in which the runner computes a
                     single image without snippets, with them
    our norms        with our kernel of residual sum, LayerNorm and quantisation, which the runner uses in full chunks
                     only; in int8

Two threads need at least half of the time of a single thread. The script prints this bound for the speed-up over the
runner: the time of the runner, divided by half of the time of one thread. The networks are the paper's, as in
`fastest_cpu.py`. The script stops if the logits of a setting differ from those of the runner.

    python benchmarks/settings/one_image_openvino.py [--rounds 20] [--family swin] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.shared.close_logits import require_close
from benchmarks.shared.families import FAMILIES, graphs_of, pair
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import time_rounds
from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.extras import require
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.cores import cores
from gmmvit_deploy.runtime.openvino import OPENVINO_HINTS, our_kernels
from gmmvit_deploy.runtime.openvino_program import OpenVinoProgram
from gmmvit_deploy.specs import input_shape

RUNNER, ONE_THREAD = "runner", "one thread"
SETTINGS: dict[str, dict[str, Any]] = {
    RUNNER: {},
    "runner again": {},
    ONE_THREAD: {"INFERENCE_NUM_THREADS": "1"},
    "threads apart": {"ENABLE_CPU_PINNING": False},
    "latency": {"PERFORMANCE_HINT": "LATENCY"},
}
SNIPPETS, OTHER_SNIPPETS = "SNIPPETS_MODE", "snippets"
OUR_NORMS = "our norms"
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")


def compiled(program: OpenVinoProgram, model: Any, setting: str) -> Callable[..., np.ndarray]:
    """Compile a model for a single image with the runner's settings, changed by ``setting``; return a function."""
    openvino = require("openvino", package="openvino", extra="openvino")
    single = model.clone()
    shape = single.inputs[0].partial_shape
    shape[0] = 1
    single.reshape(shape)
    settings = program.settings(single, 1) | SETTINGS.get(setting, {})
    if setting == OTHER_SNIPPETS and settings.pop(SNIPPETS, None) is None:
        settings[SNIPPETS] = "DISABLE"
    request = openvino.Core().compile_model(single, "CPU", settings).create_infer_request()

    def run(images: np.ndarray) -> np.ndarray:
        request.infer({0: images}, share_inputs=True)
        return np.array(request.get_output_tensor(0).data)

    return run


def of_graph(path: Path, precision: Precision, rounds: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return setting → its row.  Errors: SystemExit when our kernels are not available, or when logits differ."""
    kernels, why = our_kernels(precision)
    if kernels is None:
        raise SystemExit(f"nothing was measured: {why}")
    program = OpenVinoProgram(str(path), hint=OPENVINO_HINTS[precision], kernels=kernels)
    programs = {name: compiled(program, program.model(1), name) for name in (*SETTINGS, OTHER_SNIPPETS)}
    if program.fused_norms:
        programs[OUR_NORMS] = compiled(program, program.model(program.chunk), OUR_NORMS)
    timed = time_rounds(programs, 1, rounds, image_shape=image_shape)
    require_close(timed.logits, timed.logits[RUNNER], f"{path.name}, {precision}", precision)
    rows = {
        name: {"ms": float(np.median(ms)), "over_runner": ratio(ms, timed.ms[RUNNER])} for name, ms in timed.ms.items()
    }
    rows[ONE_THREAD]["bound"] = ratio(cores() * timed.ms[RUNNER], timed.ms[ONE_THREAD])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be repeated")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="only this type; may be repeated")
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1, family=["vit"], precision=["fp32"])
    if arguments.rounds < 1:
        parser.error("expected --rounds of at least 1")
    here = [each for each in PRECISIONS if each != "bf16" or "avx512_bf16" in cpu_features()]
    chosen = [each for each in arguments.precision or here if each in here]
    if not chosen:
        parser.error("this CPU has no bf16: expected another --precision")
    with run_card.written(arguments.output, Path(__file__).name, rounds=arguments.rounds) as results:
        results["families"] = {}
        for name in arguments.family or FAMILIES:
            graphs = graphs_of(name, ["int8_cpu" if each == "int8" else "trained" for each in chosen], max_batch=1)
            image_shape = input_shape(pair(name)["trained"].spec)
            results["families"][name] = {}
            for precision in chosen:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / f"{name}.onnx"
                    onnx.save(graphs["int8_cpu" if precision == "int8" else "trained"], path)
                    rows = of_graph(path, precision, arguments.rounds, image_shape)
                results["families"][name][precision] = rows
                for setting, row in rows.items():
                    over = ratio_words(row["over_runner"], 2)
                    print(f"{name}, {precision}, {setting}: {over} of the runner's time", flush=True)
                bound = ratio_words(rows[ONE_THREAD]["bound"], 2)
                print(f"{name}, {precision}: perfect threads would be {bound} times as fast", flush=True)


if __name__ == "__main__":
    main()
