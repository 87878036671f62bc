"""Write a repository with a stand-in for a network that sleeps: its capacity is exact, also on a busy machine.

    capacity = INSTANCES / sleep        requests of a single image a second, without the use of a processor

The stand-in takes a single image, so that the capacity does not depend on the batches that Triton forms. Its answers
can be held back: `stand_in.answers_held`.
"""

from __future__ import annotations

from pathlib import Path

from tests.serving.stand_in import held_file

__all__ = ["BUNDLE", "INSTANCES", "LOGITS", "MODEL", "SHAPE", "sleeping_repository"]

MODEL = "gmmvit_network"
SHAPE = (32, 32, 3)
LOGITS = 10
INSTANCES = 2
BUNDLE = "5" * 64
"""Stands for the SHA-256 of a bundle."""

_CONFIG = """name: "{model}"
backend: "python"
max_batch_size: 1
input {{ name: "pixels" data_type: TYPE_UINT8 dims: [ {dims} ] }}
output {{ name: "logits" data_type: TYPE_FP32 dims: [ {logits} ] }}
instance_group {{ count: {instances} kind: KIND_CPU }}
parameters {{ key: "gmmvit_bundle_sha256" value {{ string_value: "{bundle}" }} }}
"""

_MODEL = """import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({sleep_s})
        while os.path.exists({held!r}):
            time.sleep(0.01)
        answers = []
        for request in requests:
            rows = len(pb_utils.get_input_tensor_by_name(request, "pixels").as_numpy())
            logits = pb_utils.Tensor("logits", np.zeros((rows, {logits}), np.float32))
            answers.append(pb_utils.InferenceResponse(output_tensors=[logits]))
        return answers
"""


def sleeping_repository(folder: Path, *, sleep_s: float = 0.02) -> Path:
    """Write the repository to ``folder``, and return the folder."""
    (folder / MODEL / "1").mkdir(parents=True)
    dims = ", ".join(map(str, SHAPE))
    config = _CONFIG.format(model=MODEL, instances=INSTANCES, dims=dims, logits=LOGITS, bundle=BUNDLE)
    (folder / MODEL / "config.pbtxt").write_text(config, encoding="utf-8")
    source = _MODEL.format(sleep_s=sleep_s, logits=LOGITS, held=str(held_file(folder)))
    (folder / MODEL / "1" / "model.py").write_text(source, encoding="utf-8")
    return folder
