"""How large should a chunk be? A batch of 64 in chunks of each size, in ONNX Runtime and OpenVINO.

A chunk is the part of a batch that a runner computes at once. Either a single chunk runs at once on all cores, or two
chunks run at once, each on its own core. The network is the paper's ViT d9 with a Gaussian mixture mask (32×32, 10
classes, random weights). `ROWS_A_CORE` in gmmvit_deploy/runtime/onnxruntime_program.py and `CHUNK` in
openvino_program.py follow from the results of this script on two cores.

    python benchmarks/settings/cpu_settings.py [--rounds 12] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino

from benchmarks.shared.families import pair
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import time_rounds
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.runtime.onnxruntime import session_from_onnx
from gmmvit_deploy.specs import input_shape

BATCH = 64
CHUNKS = (4, 8, 16, 32, 64)
Program = Callable[[np.ndarray], np.ndarray]


def with_onnxruntime(path: Path, chunk: int, workers: int) -> Program:
    """Return a program that runs chunks in sequence on all cores, or ``workers`` chunks at once, each on a core."""
    session = session_from_onnx(path, threads=1 if workers > 1 else None)
    pool = ThreadPoolExecutor(workers)

    def run(images: np.ndarray) -> np.ndarray:
        parts = [images[start : start + chunk] for start in range(0, len(images), chunk)]
        return np.concatenate(list(pool.map(lambda part: session.run(["logits"], {"tensor": part})[0], parts)))

    return run


def with_openvino(path: Path, chunk: int, streams: int, image_shape: tuple[int, int, int]) -> Program:
    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape([chunk, *image_shape])
    settings = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": str(streams)}
    compiled = core.compile_model(model, "CPU", settings)
    requests = [compiled.create_infer_request() for _ in range(streams)]

    def run(images: np.ndarray) -> np.ndarray:
        answers: list[Any] = []
        for start in range(0, len(images), chunk * streams):
            used = requests[: (len(images) - start) // chunk]
            for index, request in enumerate(used):
                first = start + index * chunk
                request.start_async({0: images[first : first + chunk]}, share_inputs=True)
            for request in used:
                request.wait()
                answers.append(request.get_output_tensor(0).data.copy())
        return np.concatenate(answers)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--chunk", type=int, choices=CHUNKS, action="append", help="only this chunk size; may be repeated"
    )
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1, chunk=[32])
    with run_card.written(arguments.output, "cpu_settings.py", rounds=arguments.rounds, batch=BATCH) as results:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            model = pair("vit")["trained"]
            image_shape = input_shape(model.spec)
            onnx.save(onnx_from_model(fold(model).model, preprocessing=None, max_batch=BATCH), path)
            programs: dict[str, Program] = {"onnxruntime, whole": with_onnxruntime(path, BATCH, 1)}
            for chunk in arguments.chunk or CHUNKS:
                for workers in (1, 2):
                    programs[f"onnxruntime, {chunk} rows, {workers} at once"] = with_onnxruntime(path, chunk, workers)
                    programs[f"openvino, {chunk} rows, {workers} at once"] = with_openvino(
                        path, chunk, workers, image_shape
                    )
            timed = time_rounds(programs, BATCH, arguments.rounds, image_shape=image_shape)
        times, logits = timed.ms, timed.logits
        whole = logits["onnxruntime, whole"]
        results["programs"] = {}
        for name in programs:
            off = float(np.abs(logits[name] - whole).max())
            if not off < 1e-4:
                raise SystemExit(f"{name}: its logits are {off:.1e} off, so its time is not valid")
            relative = ratio(times[name], times["onnxruntime, whole"])
            results["programs"][name] = {"median_ms": float(np.median(times[name])), "over_whole": relative}
            print(f"{name}: {np.median(times[name]):.1f} ms, {ratio_words(relative)}")


if __name__ == "__main__":
    main()
