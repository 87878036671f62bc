"""Stand-ins for a network in Triton's Python backend that sleep: their capacity is exact on a busy machine.

    write_stand_in        X float32 (batch of at most 2, 1) → Y, the same values, after a sleep for the batch
    sleeping_repository   pixels of a single image → the first ten as logits; INSTANCES / sleep requests a second, as no
                          batch forms

They need no processor.  A test can hold their answers back (`answers_held`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = "stand_in"
NETWORK = "gmmvit_network"
SHAPE = (32, 32, 3)
INSTANCES = 2
BUNDLE = "5" * 64
"""Stands for the SHA-256 of a bundle."""
_ECHO = """max_batch_size: 2
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
dynamic_batching { }
"""
_SLEEPER = f"""max_batch_size: 1
input [{{ name: "pixels" data_type: TYPE_UINT8 dims: [{", ".join(map(str, SHAPE))}] }}]
output [{{ name: "logits" data_type: TYPE_FP32 dims: [10] }}]
instance_group [{{ count: {INSTANCES} kind: KIND_CPU }}]
parameters {{ key: "gmmvit_bundle_sha256" value {{ string_value: "{BUNDLE}" }} }}
"""
_CODE = """import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(DELAY_S)
        while os.path.exists(HELD):
            time.sleep(0.01)
        inputs = [pb_utils.get_input_tensor_by_name(request, INPUT).as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor(OUTPUT, answer(values))]) for values in inputs]


def answer(values):
    return values if OUTPUT == "Y" else values.reshape(len(values), -1)[:, :10].astype(np.float32)


"""


def write_stand_in(folder: Path, *, delay_s: float = 0.0) -> Path:
    """Write a repository with `MODEL`.  delay_s: the time for a batch of at most two requests, in seconds."""
    return _written(folder, MODEL, _ECHO, INPUT="X", OUTPUT="Y", DELAY_S=delay_s)


def sleeping_repository(folder: Path, *, sleep_s: float = 0.02) -> Path:
    """Write a repository with `NETWORK`.  sleep_s: the time for an image, in seconds."""
    return _written(folder, NETWORK, _SLEEPER, INPUT="pixels", OUTPUT="logits", DELAY_S=sleep_s)


def _written(folder: Path, model: str, config: str, **constants: object) -> Path:
    (folder / model / "1").mkdir(parents=True)
    (folder / model / "config.pbtxt").write_text(f'name: "{model}"\nbackend: "python"\n{config}')
    constants["HELD"] = str(held_file(folder))
    code = _CODE + "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    (folder / model / "1" / "model.py").write_text(code)
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
    """Return the JSON of a request to `MODEL`, which answers with the same value."""
    return json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}).encode()
