"""How much time does the server add to a request with a single image?

The network is that of `gmmvit demo` with random weights. A client sends one image a request over gRPC, and waits for
the answer, which is compared with PyTorch's float64 logits. All steps take turns in each round:

    in process      the same runtime in the client's process, without a server
    gRPC            a call that asks only whether the server lives: the cost of gRPC
    no network      the network's model without its network: it answers with zeros. gRPC, Triton, its Python backend
    served          the network
    image           the ensemble, which also decodes a PNG file

Measured with pixels (uint8) and with a normalised tensor (float32) as the input, in ONNX Runtime and in OpenVINO. The
client and the server share the machine's cores.

    python benchmarks/one_image.py [--runtime onnxruntime] [--rounds 20] [--check] [--output RESULT]
"""

from __future__ import annotations

import io
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import grpc
import numpy as np
import torch
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.shared import run_card
from benchmarks.shared.interleaved import turns
from benchmarks.shared.options import parsed, script_parser
from gmmvit_deploy.bench.outputs import Expected
from gmmvit_deploy.bench.waterfall import server_parts, timings_of
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.demo.models import DIGITS_SPEC, save_checkpoint
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.measure.turns import settle
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph
from gmmvit_deploy.runtimes.runners.open import open_runners
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

Kind = Literal["pixels", "tensor"]
Run = Callable[[int], Any]
"""Sends the input with this index, and returns the logits; None from a step that computes no logits."""
IN_PROCESS, GRPC, EMPTY, SERVED, IMAGE = "in process", "gRPC", "no network", "served", "image"
RUNTIMES = ("onnxruntime", "openvino")
TARGET_MS = 0.5
_INPUTS = 16


def digits_bundle(folder: Path, kind: Kind) -> Bundle:
    torch.manual_seed(0)
    checkpoint = folder / f"{kind}.pth"
    save_checkpoint(model_from_spec(DIGITS_SPEC).eval(), checkpoint, epoch=0)
    options = ExportOptions(mean=(0.3053,) * 3, std=(0.376,) * 3, labels=tuple(map(str, range(10))), input_kind=kind)
    return bundle_from_checkpoint(checkpoint, folder / kind, options)


def add_empty_model(repository: Path) -> None:
    """Add a copy of the network's model, called ``empty``, that answers with zeros."""
    copy = repository / "empty"
    shutil.copytree(repository / "gmmvit_network", copy)
    for path, old, new in (
        (copy / "config.pbtxt", 'name: "gmmvit_network"', 'name: "empty"'),
        (
            copy / "1" / "model.py",
            "computed = self.program(together)",
            "computed = [np.zeros((len(together), 10), np.float32)]",
        ),
    ):
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{path}: expected {old!r} once, so that the script can replace it")
        path.write_text(text.replace(old, new), encoding="utf-8")


def measured(bundle: Bundle, kind: Kind, runtime: str, folder: Path, rounds: int, requests: int) -> dict[str, Any]:
    kernels = runtime == "openvino" and kernels_for_graph(bundle.onnx_path, "fp32")[0] is not None
    choices = RepositoryOptions(runner=RunnerName(runtime, kernels=kernels))
    repository = repository_from_bundle(bundle, folder / f"{kind}-{runtime}", choices)
    add_empty_model(repository.path)
    shape = (_INPUTS, *bundle.manifest.image.pixels_shape)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    inputs = bundle.inputs_from_pixels(pixels)
    expected = Expected(bundle, inputs)
    images = np.array([[_png(image)] for image in pixels], dtype=np.object_)
    with ExitStack() as stack:
        options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
        server = stack.enter_context(TritonServer(repository.path, options=options))
        names = [repository.runner, "triton-grpc"]
        local, served = stack.enter_context(open_runners(names, bundle, urls=[server.grpc_url]))
        if served.server is None:
            raise SystemExit("the runner triton-grpc has no server")
        asked, connection = served.server, served.server.connection
        address = server.grpc_url.removeprefix("grpc://")
        channel = stack.enter_context(grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]))
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        steps: dict[str, Run] = {
            IN_PROCESS: lambda i: local.run(inputs[i : i + 1]),
            GRPC: lambda i: stub.ServerLive(service_pb2.ServerLiveRequest()) and None,
            EMPTY: lambda i: connection.infer("empty", kind, inputs[i : i + 1]) is None or None,
            SERVED: lambda i: connection.infer("gmmvit_network", kind, inputs[i : i + 1]),
            IMAGE: lambda i: asked.infer(images[i : i + 1]),
        }
        models = {EMPTY: ("empty",), SERVED: (asked.network,), IMAGE: (asked.preprocess, asked.network)}
        ms: dict[str, list[float]] = {name: [] for name in steps}
        parts: dict[str, list[dict[str, float]]] = {name: [] for name in models}
        largest = 0.0
        for name, timed in turns(list(steps), rounds, np.random.default_rng(0), warm_ups=2):
            settle(partial(steps[name], 0))
            before = timings_of(asked, models.get(name, ()))
            times, error = turn(steps[name], requests, expected)
            largest = max(largest, error)
            if timed:
                ms[name].append(float(np.median(times)))
                if name in models:
                    after = timings_of(asked, models[name])
                    parts[name].append(server_parts(models[name], before, after))
        limit = expected.limit(served.precision).largest
        if not largest <= limit:
            raise SystemExit(f"{kind}: the logits differ by {largest:.2g}, expected at most {limit:.2g}")
    return {
        "runtime": names[0],
        "steps": {name: _summary(ms[name], ms[IN_PROCESS]) for name in steps},
        "server_parts_ms": {
            name: {part: float(np.median([r[part] for r in rows])) for part in rows[0]} for name, rows in parts.items()
        },
        "largest_logit_difference": largest,
        "logit_limit": limit,
    }


def turn(run: Run, requests: int, expected: Expected) -> tuple[list[float], float]:
    """Return (ms of each request, largest difference of the logits)."""
    times: list[float] = []
    answers: list[Any] = []
    indices = np.arange(requests) % _INPUTS
    for index in indices:
        start = time.perf_counter()
        answer = run(int(index))
        times.append((time.perf_counter() - start) * 1e3)
        answers.append(answer)
    if answers[0] is None:
        return times, 0.0
    return times, distance(np.concatenate(answers), expected.exact[indices])


def _summary(ms: list[float], in_process: list[float]) -> dict[str, Any]:
    over = np.array(ms) - np.array(in_process)
    low, median, high = (float(value) for value in np.percentile(over, [25, 50, 75]))
    return {
        "ms": float(np.median(ms)),
        "round_ms": ms,
        "over_in_process_ms": {"median": median, "quartiles": [low, high]},
    }


def _png(pixels: Any) -> bytes:
    file = io.BytesIO()
    image_from_pixels(pixels).save(file, "PNG")
    return file.getvalue()


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=100, help="requests of each step in a round")
    parser.add_argument("--runtime", choices=RUNTIMES, action="append", help="only this runtime; repeatable")
    arguments = parsed(parser, rounds=1, requests=5, runtime=["onnxruntime"])
    conditions = {"rounds": arguments.rounds, "requests": arguments.requests, "target_over_in_process_ms": TARGET_MS}
    with run_card.written(arguments.output, "one_image.py", **conditions) as results:
        results["inputs"] = {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for kind in get_args(Kind):
                bundle = digits_bundle(folder, kind)
                for runtime in arguments.runtime or RUNTIMES:
                    row = measured(bundle, kind, runtime, folder, arguments.rounds, arguments.requests)
                    label = f"{kind}, {row['runtime']}"
                    results["inputs"][label] = row
                    for name, step in row["steps"].items():
                        over = step["over_in_process_ms"]["median"]
                        print(f"{label}: {name}: {step['ms']:.3f} ms, {over:+.3f} ms over in process")


if __name__ == "__main__":
    main()
