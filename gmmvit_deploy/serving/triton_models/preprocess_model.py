"""Model for Triton's Python backend: convert encoded images to the network's input.

``gmmvit repository`` copies this file to ``<preprocess>/1/model.py``, and this project's ``preprocess.py`` to
``gmmvit_preprocess.py`` in the same folder. The server therefore decodes images with the same code that
``gmmvit parity`` checks. The model needs numpy and Pillow in the server's Python.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))
from gmmvit_preprocess import UnusableImage, pixels_from_bytes, tensor_from_pixels

INPUT = "IMAGE"
TARGET = ("height", "width", "channels", "resize", "crop_pct", "mean")  # arguments of pixels_from_bytes


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.output = config["output"][0]["name"]
        self.max_batch = config["max_batch_size"]
        settings = json.loads(config["parameters"]["preprocessing"]["string_value"])
        self.target = {name: settings[name] for name in TARGET}
        self.mean, self.std = settings["mean"], settings["std"]
        # Pillow releases the interpreter lock while it decodes, so several threads decode the images of a batch.
        self.pool = ThreadPoolExecutor(max_workers=settings["threads"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self.pool.shutdown()

    def _answer(self, request: Any) -> Any:
        images = pb_utils.get_input_tensor_by_name(request, INPUT).as_numpy().reshape(-1)
        if not 1 <= len(images) <= self.max_batch:
            return _refused(f"expected a batch of 1 to {self.max_batch} images, got {len(images)}")
        decoded = list(self.pool.map(self._decoded, images))
        problems = [f"image {i}: {reason}" for i, reason in enumerate(decoded) if isinstance(reason, str)]
        if problems:
            return _refused("; ".join(problems[:5]))
        batch = np.stack(decoded)
        if self.output == "tensor":
            batch = tensor_from_pixels(batch, self.mean, self.std)
        return pb_utils.InferenceResponse([pb_utils.Tensor(self.output, batch)])

    def _decoded(self, data: bytes) -> Any:
        """Return the pixels of an image, or the reason why the image cannot be used."""
        try:
            return pixels_from_bytes(data, **self.target)
        except UnusableImage as exc:
            return str(exc)


def _refused(message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
