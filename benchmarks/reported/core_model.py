"""What would more than two cores bring, and when do several processes with few threads beat one with many?

The network is the paper's ViT d9 with a Gaussian mixture mask (32×32, 10 classes, random weights), in ONNX Runtime and
in OpenVINO, in float32. `gmmvit_deploy.bench.core_model` predicts times from parts that are measured on one core and
between two: the products' rate, the bandwidth of the memory, and the distance of the cores. In every round, the script
measures the parts, and then what the model predicts for two cores:

    image        the time of a single image with two threads
    batch        images a second of a batch of 64 in chunks, on two cores
    instances    single images a second of two instances with a thread each, at the same time

The error is the prediction divided by the measurement. Times on one core are parts of the model, so they have no error.
Predictions for 4, 8, 16 and 64 cores are marked as unchecked: no machine has checked them. They are made for the
measured distance of the cores and for distant cores.

    python benchmarks/reported/core_model.py [--rounds 9] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.shared.families import graphs_of, pair
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.core_model import CoreModel
from gmmvit_deploy.bench.core_parts import measured_parts, ms_of
from gmmvit_deploy.bench.roofline import NetworkWork, work_of_graph
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.runtime.cores import cores
from gmmvit_deploy.runtime.onnxruntime import program_from_onnx
from gmmvit_deploy.runtime.onnxruntime_program import ROWS_A_CORE
from gmmvit_deploy.runtime.openvino_program import CHUNK, OpenVinoProgram
from gmmvit_deploy.specs import input_shape

PREDICTED_CORES = (4, 8, 16, 64)
FAR_NS = 330.0
"""The round trip between distant cores, as in `core_to_core.FAR`."""
_BATCH = 64
_RUNTIMES: dict[str, tuple[Callable[[Path, int], Any], int]] = {
    "onnxruntime": (lambda path, threads: program_from_onnx(path, threads=threads), ROWS_A_CORE),
    "openvino": (lambda path, threads: OpenVinoProgram(str(path), hint="f32", threads=threads), CHUNK),
}
"""Runtime → (function that opens a program with a number of threads, images of a chunk)."""


def predicted_and_measured(
    runtime: str, path: Path, work: NetworkWork, images: np.ndarray, rounds: int
) -> tuple[CoreModel, dict[str, list[tuple[float, float]]]]:
    """Return (the model of the median round, quantity → (prediction, measurement) of each round)."""
    open_program, chunk = _RUNTIMES[runtime]
    single, second, double = (open_program(path, threads) for threads in (1, 1, 2))
    quantities: dict[str, list[tuple[float, float]]] = {name: [] for name in ("image", "batch", "instances")}
    models = []
    with ThreadPoolExecutor(2) as pool:

        def both() -> None:
            for answer in [pool.submit(program.run, images[:1]) for program in (single, second)]:
                answer.result()

        for _ in range(rounds):
            model = measured_parts(single.run, work, images[:chunk])
            if model is None:
                raise SystemExit("core_model.py needs two cores and a C compiler")
            models.append(model)
            quantities["image"].append((model.latency_ms(2), ms_of(lambda: double.run(images[:1]))))
            batch_ms = ms_of(lambda: double.run(images))
            quantities["batch"].append((model.batch_rate(2), 1e3 * len(images) / batch_ms))
            quantities["instances"].append((2e3 / model.latency_ms(1, beside=2), 2e3 / ms_of(both)))
    return sorted(models, key=lambda model: model.image_ms)[len(models) // 2], quantities


def predictions(model: CoreModel, count: int) -> dict[str, Any]:
    rows = model.divisions(count)
    best = model.best_division(count)
    return {
        "status": "unchecked",
        "batch_rate": model.batch_rate(count),
        "divisions": [asdict(row) for row in rows],
        "best_instances": best.instances,
        "best_over_one_instance": best.rate / rows[0].rate,
        "fastest_threads": min(range(1, count + 1), key=model.latency_ms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1)
    if cores() < 2:
        raise SystemExit("core_model.py needs two cores")
    with (
        tempfile.TemporaryDirectory() as folder,
        run_card.written(arguments.output, Path(__file__).name, rounds=arguments.rounds) as results,
    ):
        model = pair("vit")["trained"]
        images = np.random.default_rng(0).standard_normal((_BATCH, *input_shape(model.spec)), dtype=np.float32)
        path = Path(folder) / "model.onnx"
        onnx.save(graphs_of("vit", ["trained"], max_batch=_BATCH)["trained"], path)
        work = work_of_graph(onnx.load(path), 1)
        results["runtimes"] = {}
        for runtime in _RUNTIMES:
            median, quantities = predicted_and_measured(runtime, path, work, images, arguments.rounds)
            checked = {
                name: {
                    "predicted": float(np.median([value for value, _ in values])),
                    "measured": float(np.median([value for _, value in values])),
                    "predicted_over_measured": ratio([value for value, _ in values], [value for _, value in values]),
                }
                for name, values in quantities.items()
            }
            far = replace(median, round_trip_ns=FAR_NS)
            results["runtimes"][runtime] = {
                "parts": median.to_json(),
                "two_cores": checked,
                "more_cores": {str(count): predictions(median, count) for count in PREDICTED_CORES},
                "more_distant_cores": {str(count): predictions(far, count) for count in PREDICTED_CORES},
            }
            for name, row in checked.items():
                error = ratio_words(row["predicted_over_measured"], 2)
                print(f"{runtime}, 2 cores, {name}: predicted / measured {error}")
            for count in PREDICTED_CORES:
                row = results["runtimes"][runtime]["more_cores"][str(count)]
                best, gain = row["best_instances"], row["best_over_one_instance"]
                print(f"{runtime}, {count} cores (unchecked): {row['batch_rate']:.0f} images/s in batches")
                print(f"{runtime}, {count} cores (unchecked): {best} instances, {gain:.1f} × the rate of a single one")


if __name__ == "__main__":
    main()
