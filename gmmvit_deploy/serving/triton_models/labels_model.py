"""Model for Triton's Python backend: turn logits into labels, likeliest first.

``gmmvit repository`` copies this file to ``<name>_labels/1/model.py``, and `gmmvit_deploy.inference` to
``gmmvit_inference`` in the same folder, so that the server's answers are those of ``gmmvit classify``.

    logits float32 (B, C) → label bytes (B, k), probability float32 (B, k), index int32 (B, k)

The parameter ``top`` of a request is k, at least 1; the default is 5. With fewer classes, k is C. For a multi-label
network, k is larger where labels further down are present, and ``present`` bool (B, k) states which labels
reach their threshold.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))
from gmmvit_inference.labels import DEFAULT_TOP, LabelSet


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        stated = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.max_batch = config["max_batch_size"]
        (self.classes,) = map(int, config["input"][0]["dims"])
        self.label_set = LabelSet.from_parameters(stated)
        self.labels = np.array([label.encode() for label in self.label_set.labels], dtype=np.object_)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answered(request) for request in requests]

    def _answered(self, request: Any) -> Any:
        logits = pb_utils.get_input_tensor_by_name(request, "logits").as_numpy()
        if not 1 <= len(logits) <= self.max_batch:
            return _refused(f"expected a batch of 1 to {self.max_batch}, got {len(logits)}")
        top = json.loads(request.parameters() or "{}").get("top", DEFAULT_TOP)
        if type(top) is not int or top < 1:
            return _refused(f"top: expected a whole number of at least 1, got {json.dumps(top)[:20]}")
        try:
            ranked = self.label_set.ranked(logits, min(top, self.classes))
        except ValueError as exc:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(exc)))
        tensors = [
            pb_utils.Tensor("label", self.labels[ranked.indices]),
            pb_utils.Tensor("probability", ranked.probabilities.astype(np.float32)),
            pb_utils.Tensor("index", ranked.indices.astype(np.int32)),
        ]
        if self.label_set.task == "multi-label":
            tensors.append(pb_utils.Tensor("present", ranked.present))
        return pb_utils.InferenceResponse(tensors)


def _refused(message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
