"""How long should ONNX Runtime's threads look for more work after an image, before they sleep?

The network is the paper's ViT d9 with a Gaussian mixture mask (32×32, 10 classes, random weights). Our runner's program
runs single images on two cores. A setting is ONNX Runtime's default, a spinning time in µs, or no spinning. For each
setting, the script measures:

    alone           the time of an image, with a single session
    beside another  the time of an image, with two sessions that alternate, as two models of a server do. The spinning
                    threads of a session slow the other session down
    spent after     the processor time that the session's threads use in the 200 ms after the last image

`_SESSION_ENTRIES` in onnxruntime_program.py follows from these results.

    python benchmarks/settings/spinning.py [--rounds 25] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.shared.families import graphs_of, pair
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import turns
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.runtime.onnxruntime import FusedGraph, fused_graph
from gmmvit_deploy.specs import input_shape

DEFAULT = "default"
SETTINGS: dict[str, dict[str, str]] = {
    DEFAULT: {},
    "5000 µs": {"session.intra_op.spin_duration_us": "5000"},
    "1000 µs": {"session.intra_op.spin_duration_us": "1000"},
    "200 µs": {"session.intra_op.spin_duration_us": "200"},
    "none": {"session.intra_op.allow_spinning": "0"},
}
_IMAGES_A_TURN = 48
_ASLEEP_S = 0.2

Run = Callable[[], np.ndarray]


def opened(fused: FusedGraph, entries: dict[str, str], image: np.ndarray) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(fused.library))
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    session = onnxruntime.InferenceSession(fused.graph, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(["logits"], {"tensor": image})[0]


def ms_an_image(*sessions: Run) -> float:
    """Return the ms per image.  Several sessions take turns, with an image in each turn."""
    for run in sessions:
        run()
    start = time.perf_counter()
    for index in range(_IMAGES_A_TURN * len(sessions)):
        sessions[index % len(sessions)]()
    return (time.perf_counter() - start) / (_IMAGES_A_TURN * len(sessions)) * 1e3


def spent_after_ms() -> float:
    """Return the processor time in ms that the other threads use while the main thread sleeps for 200 ms."""
    start = time.process_time()
    time.sleep(_ASLEEP_S)
    return (time.process_time() - start) * 1e3


def measured(fused: FusedGraph, image_shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    image = generator.standard_normal((1, *image_shape), dtype=np.float32)
    sessions = {name: [opened(fused, entries, image) for _ in range(2)] for name, entries in SETTINGS.items()}
    truth = sessions[DEFAULT][0]()
    times: dict[str, dict[str, list[float]]] = {"alone": {}, "beside": {}, "after": {}}
    for name, _ in turns(list(SETTINGS), rounds, generator):
        first, second = sessions[name]
        times["alone"].setdefault(name, []).append(ms_an_image(first))
        times["after"].setdefault(name, []).append(spent_after_ms())
        times["beside"].setdefault(name, []).append(ms_an_image(first, second))
        time.sleep(_ASLEEP_S)
        if not np.allclose(second(), truth, atol=1e-5):
            raise SystemExit(f"{name}: its logits differ from those of the default, so its time is not valid")
    over = {
        column: {name: ratio(times[column][name], times[column][DEFAULT]) for name in SETTINGS}
        for column in ("alone", "beside")
    }
    return {
        name: {
            "alone_ms": float(np.median(times["alone"][name])),
            "beside_ms": float(np.median(times["beside"][name])),
            "alone_over_default": over["alone"][name],
            "beside_over_default": over["beside"][name],
            "spent_after_ms": float(np.median(times["after"][name])),
        }
        for name in SETTINGS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1)
    with run_card.written(arguments.output, Path(__file__).name, rounds=arguments.rounds) as results:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(graphs_of("vit", ("trained",), max_batch=64)["trained"], path)
            fused, why = fused_graph(path)
            if fused is None:
                raise SystemExit(f"{path.name} cannot be measured without our attention kernel: {why}")
            results["settings"] = measured(fused, input_shape(pair("vit")["trained"].spec), arguments.rounds)
        for name, row in results["settings"].items():
            alone, beside = (ratio_words(row[f"{column}_over_default"]) for column in ("alone", "beside"))
            after = f"{row['spent_after_ms']:.1f} ms spent after"
            print(f"{name}: alone {row['alone_ms']:.2f} ms, {alone}; beside another {beside}; {after}")


if __name__ == "__main__":
    main()
