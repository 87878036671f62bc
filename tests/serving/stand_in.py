"""A model for Triton's Python backend that sleeps: its capacity is exact on a busy machine, and needs no processor.

A test can hold its answers back (`answers_held`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MODEL", "answers_held", "held_file", "infer_body", "write_stand_in"]

MODEL = "stand_in"
_CONFIG = """name: "stand_in"
backend: "python"
max_batch_size: 2
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
dynamic_batching { }
"""
_CODE = """import os
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(DELAY_S)
        while os.path.exists(HELD):
            time.sleep(0.01)
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)]) for values in inputs]
"""


def write_stand_in(folder: Path, *, delay_s: float = 0.0) -> Path:
    """Write a repository with the model.  delay_s: the time for a batch of at most two requests, in seconds."""
    (folder / MODEL / "1").mkdir(parents=True)
    (folder / MODEL / "config.pbtxt").write_text(_CONFIG)
    settings = f"DELAY_S = {delay_s}\nHELD = {str(held_file(folder))!r}\n\n"
    (folder / MODEL / "1" / "model.py").write_text(settings + _CODE)
    return folder


@contextmanager
def answers_held(folder: Path) -> Iterator[None]:
    """Hold the answers of a repository's model back, inside the ``with`` block."""
    held_file(folder).touch()
    try:
        yield
    finally:
        held_file(folder).unlink()


def held_file(folder: Path) -> Path:
    """Return the file beside a repository that holds the answers back while it exists."""
    return folder.with_name(f"{folder.name}.held")


def infer_body(value: float) -> bytes:
    """Return the JSON of a request; the model answers with the same value."""
    return json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}).encode()
