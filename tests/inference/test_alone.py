"""What a server gets of this project runs there without the rest: the code, and the kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.serving.repository import repository_from_bundle
from tests.inference.test_preprocess import encoded, photo

CODE = """
import json, sys
from pathlib import Path

folder, target, labels = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.path.insert(0, str(folder))
sys.modules.update(dict.fromkeys(("gmmvit_deploy", "torch", "onnx")))  # importing them fails

import numpy as np
import onnxruntime
from gmmvit_inference.labels import LabelSet
from gmmvit_inference.onnxruntime_program import OnnxRuntimeProgram, session_options
from gmmvit_inference.openvino_kernels import kernels_from
from gmmvit_inference.openvino_program import OpenVinoProgram
from gmmvit_inference.preprocess import pixels_from_bytes

def session(threads):
    return onnxruntime.InferenceSession(graph, session_options(threads), providers=["CPUExecutionProvider"])

graph, library = str(folder / "model.onnx"), folder / "openvino_kernels.so"
kernels, said = kernels_from(library, "f32") if library.exists() else (None, "f32")
assert said == "f32", said
pixels = pixels_from_bytes(sys.stdin.buffer.read(), **target)
for program in (OpenVinoProgram(graph, hint="f32", kernels=kernels), OnnxRuntimeProgram(session)):
    (logits,) = program.answers(pixels[None])
    guesses = LabelSet(labels=tuple(labels)).predictions(logits[0], 3)
    print(json.dumps([logits[0].tolist(), [guess.label for guess in guesses]]))
"""


@pytest.mark.integration
def test_a_server_needs_nothing_else_of_this_project(bundle: Bundle, tmp_path: Path) -> None:
    """Images become labels in a Python without this project and PyTorch, as without a server."""
    repository_from_bundle(bundle, tmp_path / "models")
    folder = tmp_path / "models" / "gmmvit_network" / "1"
    assert (folder / "openvino_kernels.so").exists() == bool(kernels_for_graph(bundle.onnx_path, "fp32")[0])
    image, labels = encoded(photo(50, 40), "PNG"), bundle.manifest.labels
    target = {"height": 32, "width": 32, "channels": 3, "resize": bundle.manifest.image.resize}
    done = subprocess.run(
        [sys.executable, "-I", "-c", CODE, str(folder), json.dumps(target), json.dumps(labels)],
        input=image,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    alone = [json.loads(line) for line in done.stdout.splitlines()]
    pixels = bundle.manifest.image.pixels_from_bytes(image)
    for name, (logits, guessed) in zip(("openvino", "onnxruntime"), alone, strict=True):
        with open_runner(name, bundle) as runner:
            (expected,) = runner.run(pixels[None])
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        assert guessed == [guess.label for guess in LabelSet(labels=labels).predictions(expected, 3)]
