"""Model for Triton's Python backend: run the network in ONNX Runtime or OpenVINO.

``gmmvit repository --backend python`` copies this file to ``<network>/1/model.py``, into the same folder as
``model.onnx`` and, of a cascade, ``again.onnx`` in float32, and `gmmvit_deploy.inference` to ``gmmvit_inference``
there: the server runs the same code as a runner without a server. The model needs numpy and the runtime in the server's
Python.

Triton's dynamic batcher passes several requests at once. The model runs these requests as a single batch.
"""

import json
import os
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))
from gmmvit_inference import PROBE_ID
from gmmvit_inference.answer_counts import SURENESS, count_answers
from gmmvit_inference.cascade import Cascade
from gmmvit_inference.labels import LabelSet
from gmmvit_inference.precision import SPECS
from gmmvit_inference.reference_outputs import wrong_in_batch
from gmmvit_inference.runner_name import RunnerName

_COUNTERS = (
    ("gmmvit_images_total", "Images that a cascade answered"),
    ("gmmvit_deferred_images_total", "Images that a cascade computed again in float32"),
)
_CLASSES = 100
"""The number of classes with a series of their own in the metrics: those that are answered first."""
_OTHERS = "(other classes)"


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.max_batch = config["max_batch_size"]
        self.input = config["input"][0]["name"]
        self.outputs = [output["name"] for output in config["output"]]
        threads = int(parameters["threads"])  # 0 uses a thread per core
        runner = RunnerName.parse(parameters["gmmvit_runner"])
        self.counters: list[Any] = []
        self.answers: _Answers | None = None

        def network(name: RunnerName, file: str, limits: str) -> Any:
            graph = str(Path(__file__).with_name(file))
            of_openvino = name.runtime == "openvino"
            loaded = _openvino(graph, threads, name) if of_openvino else _onnxruntime(graph, threads)
            loaded.prepare(self.max_batch)
            full = min(self.max_batch, loaded.chunk * loaded.threads)
            _require_reference_outputs(loaded.answers, json.loads(parameters[limits]), full)
            return loaded.answers

        label_set, name = LabelSet.from_parameters(parameters), args["model_name"].removesuffix("_network")
        if "logits" in self.outputs:
            expected = json.loads(parameters.get("expected_answers", "{}"))
            self.answers = _Answers(name, label_set, expected)
        if not runner.cascade:
            self.program = network(runner, "model.onnx", "reference_limits")
            return
        first, second = runner.stages
        multi = label_set.task == "multi-label"
        self.program = Cascade(
            network(first, "model.onnx", "reference_limits"),
            network(second, "again.onnx", "again_limits"),
            float(parameters["deferral_threshold"]),
            np.array(label_set.threshold_logits, np.float32) if multi else None,
        ).answers
        # Triton's metrics need their families as long as they live.
        self.families = [_family(name, words) for name, words in _COUNTERS]
        self.counters = [family.Metric(labels={"model": name}) for family in self.families]

    def finalize(self) -> None:
        if self.answers is not None:
            self.answers.close()

    def execute(self, requests: list[Any]) -> list[Any]:
        batches = [pb_utils.get_input_tensor_by_name(request, self.input).as_numpy() for request in requests]
        answers: list[Any] = [None] * len(requests)
        valid = []
        for i, batch in enumerate(batches):
            if 1 <= len(batch) <= self.max_batch:
                valid.append(i)
            else:
                message = f"expected a batch of 1 to {self.max_batch}, got {len(batch)}"
                answers[i] = pb_utils.InferenceResponse(
                    error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
                )
        if valid:
            self._run(requests, batches, valid, answers)
        return answers

    def _run(self, requests: list[Any], batches: list[Any], valid: list[int], answers: list[Any]) -> None:
        """Run the valid requests as a single batch, and write each request's rows of the outputs to ``answers``."""
        together = batches[valid[0]] if len(valid) == 1 else np.concatenate([batches[i] for i in valid])
        try:
            computed = self.program(together)
        except Exception as exc:  # an error in the runtime fails these requests; the server keeps running
            error = pb_utils.TritonError(f"{type(exc).__name__}: {exc}")
            for i in valid:
                answers[i] = pb_utils.InferenceResponse(error=error)
            return
        start = 0
        for i in valid:
            end = start + len(batches[i])
            tensors = [
                pb_utils.Tensor(name, np.ascontiguousarray(rows[start:end]))
                for name, rows in zip(self.outputs, computed, strict=True)
            ]
            answers[i] = pb_utils.InferenceResponse(tensors)
            if self.answers is not None and requests[i].request_id() != PROBE_ID:
                self.answers.waiting.append(computed[self.outputs.index("logits")][start:end])
                if self.counters:
                    images, deferred = self.counters
                    images.increment(end - start)
                    deferred.increment(int(computed[-1][start:end].sum()))
            start = end


class _Answers:
    """Counts the answers that clients got, in Triton's metrics.

    A request only leaves its logits in ``waiting``. A thread counts all of them each second, because each change of a
    metric is a message to another process.
    """

    def __init__(self, model: str, label_set: LabelSet, expected: dict[str, dict[str, int]]) -> None:
        """expected: kind → bucket → number of the images on which ``gmmvit optimize`` judged."""
        self.model, self.label_set = model, label_set
        self.family = _family("gmmvit_answers_total", "Images answered, each counted once for each kind")
        self.metrics = {key: self.metric(self.family, *key) for key in SURENESS}
        about = "The share of the images on which gmmvit optimize judged"
        self.expected_family = _family("gmmvit_expected_answers_ratio", about, "GAUGE")
        self.expected = {}
        for kind, counts in expected.items():
            for bucket, count in counts.items():
                self.expected[kind, bucket] = self.metric(self.expected_family, kind, bucket)
                self.expected[kind, bucket].set(count / sum(counts.values()))
        self.waiting: deque[Any] = deque()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def metric(self, family: Any, kind: str, bucket: str) -> Any:
        return family.Metric(labels={"model": self.model, "kind": kind, "bucket": bucket})

    def run(self) -> None:
        while not self.closing.wait(1.0):
            waiting = [self.waiting.popleft() for _ in range(len(self.waiting))]
            try:
                if waiting:
                    self.count(np.concatenate(waiting))
            except Exception as exc:  # the thread must live, so that nothing collects in ``waiting``
                pb_utils.Logger.log_error(f"answers of a second are not counted: {type(exc).__name__}: {exc}")

    def count(self, logits: Any) -> None:
        for (kind, bucket), number in count_answers(logits, self.label_set).items():
            if (kind, bucket) not in self.metrics and len(self.metrics) >= len(SURENESS) + _CLASSES:
                bucket = _OTHERS
            if (kind, bucket) not in self.metrics:
                self.metrics[kind, bucket] = self.metric(self.family, kind, bucket)
            self.metrics[kind, bucket].increment(number)

    def close(self) -> None:
        self.closing.set()
        self.thread.join()


def _family(name: str, meaning: str, kind: str = "COUNTER") -> Any:
    """Return a family of metrics, which must live as long as they do."""
    families = pb_utils.MetricFamily
    return families(name=name, description=meaning, kind=getattr(families, kind))


def _onnxruntime(graph: str, threads: int) -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at the import: ONNX Runtime would report its use
    import onnxruntime
    from gmmvit_inference.onnxruntime_program import OnnxRuntimeProgram, session_options

    _log_attention("ONNX Runtime")

    def session(number: int) -> Any:
        return onnxruntime.InferenceSession(graph, session_options(number), providers=["CPUExecutionProvider"])

    return OnnxRuntimeProgram(session, threads=threads)


def _openvino(graph: str, threads: int, runner: RunnerName) -> Any:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # OpenVINO would report its import
    from gmmvit_inference.openvino_program import OpenVinoProgram, UnusedKernelsError

    hint = SPECS[runner.precision].openvino
    if not runner.kernels:
        _log_attention("OpenVINO")
        return OpenVinoProgram(graph, hint=hint, threads=threads)
    from gmmvit_inference.openvino_kernels import kernels_from

    ours, why = kernels_from(Path(__file__).with_name("openvino_kernels.so"), SPECS[runner.precision].attention)
    if not ours:
        raise _without_kernels(runner, why)
    try:
        program = OpenVinoProgram(graph, hint=hint, threads=threads, kernels=ours)
    except UnusedKernelsError as exc:
        raise _without_kernels(runner, str(exc)) from exc
    _log_attention("our kernels")
    return program


def _without_kernels(runner: RunnerName, why: str) -> Exception:
    """Return the error with which the model is not loaded: clients rely on the runner that it states."""
    return pb_utils.TritonModelException(  # type: ignore[no-any-return]
        f"runner {runner}: our kernels cannot run on this server: {why}; type gmmvit repository on this machine to "
        f"write the repository again, or type --runner {replace(runner, kernels=False)} to run without our kernels"
    )


def _require_reference_outputs(program: Any, limits: dict[str, float], full: int) -> None:
    """Refuse to load the model if its outputs differ from those of PyTorch, which the bundle has for some inputs.

    Runtimes compile or choose other operators for an image alone and for a batch, so that both are compared.

    limits: name of an output → the largest allowed difference.
    full: the images that all cores compute at once. With more images, the cores repeat the same.
    """
    with np.load(Path(__file__).with_name("golden.npz"), allow_pickle=False) as golden:
        inputs, expected = golden["inputs"], {output: golden[output] for output in limits}
    for size in sorted({1, full}):
        rows = {output: values[:size] for output, values in expected.items()}
        if problem := wrong_in_batch(program, inputs[:size], rows, limits, size):
            raise pb_utils.TritonModelException(
                f"the network is wrong on this server: {problem}; type --runner with another runner"
            )


def _log_attention(by: str) -> None:
    pb_utils.Logger.log_info(f"attention is computed by {by}")
