"""The network and the preprocessing that every peer's service uses: Pillow, numpy, ONNX Runtime or OpenVINO.

The services run with the Python of an environment that has the peers' packages, so this file imports nothing of this
project.  The environment variable ``PEER_SERVICE`` holds JSON with

    graph     path of the straight export, with an input ``tensor`` of a dynamic batch
    runtime   onnxruntime, openvino (in float32), or openvino:bf16 and openvino:int8 (a graph of NNCF), where OpenVINO
              chooses the type of what is not quantised: bf16 on a CPU with AVX512-BF16
    workers   processes that compute            threads   threads of each of these processes
    port      the port to listen on             batch     the largest batch
    image     height, width, mean, std, crop_pct, and the names ``fit`` and ``filter`` of a resize rule
"""

from __future__ import annotations

import io
import json
import os
from typing import Any

import numpy as np
from PIL import Image

SETTINGS: dict[str, Any] = json.loads(os.environ["PEER_SERVICE"])
_TOP = 5


class Classifier:
    def __init__(self) -> None:
        runtime, _, precision = SETTINGS["runtime"].partition(":")
        if runtime == "openvino":
            self._run = _in_openvino(SETTINGS["graph"], SETTINGS["threads"], in_float32=not precision)
        else:
            self._run = _in_onnxruntime(SETTINGS["graph"], SETTINGS["threads"])
        image = SETTINGS["image"]
        self._shape = (image["height"], image["width"], 3)
        self._mean, self._std = (np.asarray(image[name], np.float32) for name in ("mean", "std"))
        self.classify([self.decode(bytes(int(np.prod(self._shape))))])  # so that no request waits for the first run

    def decode(self, body: bytes) -> np.ndarray:
        """Return the input (3, height, width), float32, of an image file, or of height × width × 3 bytes of pixels."""
        if len(body) == np.prod(self._shape):
            pixels = np.frombuffer(body, np.uint8).reshape(self._shape)
        else:
            pixels = np.asarray(_fitted(Image.open(io.BytesIO(body)).convert("RGB")))
        tensor = (pixels.astype(np.float32) / np.float32(255) - self._mean) / self._std
        return np.ascontiguousarray(tensor.transpose(2, 0, 1))

    def classify(self, images: list[np.ndarray]) -> list[dict[str, Any]]:
        """Return the most probable classes of each image and their probabilities, best first."""
        logits = self._run(np.stack(images))
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        probabilities = exponentials / exponentials.sum(1, keepdims=True)
        best = np.argsort(-logits, axis=1)[:, :_TOP]
        return [
            {"index": top.tolist(), "probability": row[top].tolist()}
            for top, row in zip(best, probabilities, strict=True)
        ]

    def classify_one(self, body: bytes) -> dict[str, Any]:
        return self.classify([self.decode(body)])[0]


def _fitted(image: Image.Image) -> Image.Image:
    rule = SETTINGS["image"]
    width, height = rule["width"], rule["height"]
    resampling = Image.Resampling[rule["filter"].upper()]
    if rule["fit"] == "stretch":
        return image if image.size == (width, height) else image.resize((width, height), resampling)
    scaled = int(width / rule["crop_pct"])
    shorter = min(image.size)
    size = int(scaled * image.width / shorter), int(scaled * image.height / shorter)
    resized = image.resize(size, resampling)
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return resized.crop((left, top, left + width, top + height))


def _in_onnxruntime(graph: str, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda tensors: session.run(["logits"], {"tensor": tensors})[0]


def _in_openvino(graph: str, threads: int, *, in_float32: bool) -> Any:
    import openvino

    # Workers that are pinned would all be pinned to the first cores.
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    if in_float32:
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = openvino.Core().compile_model(graph, "CPU", settings)
    return lambda tensors: compiled(tensors)[0]
