"""How much faster than PyTorch can each family be served on a CPU, how near to the hardware, and is a mask free?

The five models of the paper as its released code names them (32×32, 10 classes, GMM with K = 5 a head), random
weights, and their plain twins with the same weights and no mask. Side by side in one process:

    eager              PyTorch, attention as the released code writes it (Einsum)
    straight export    the same module exported unfolded, in ONNX Runtime: what one has without this project
    onnxruntime        our export, chunked as our runner does it
    openvino[:type]    our export in OpenVINO, float32 or bf16; :int8 the Q/DQ graph that `gmmvit convert` writes
    … plain            the twin of the same, for what the mask costs

Ratios are medians of the rounds' own ratios, with bootstrap intervals. Answers of every timed program are held
to the limits of parity (`gmmvit_deploy/tolerances.py`) in the same run; a wrong one stops the script. The roofline
is measured right before each family: the best library on the model's own matrix products.

    python benchmarks/fastest_cpu.py [--rounds 15] [--output benchmarks/results/fastest_cpu.json]
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from side_by_side import BATCHES, Family, Program, main

from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.runtime.onnxruntime import ROWS_A_CORE, session_from_onnx
from gmmvit_deploy.runtime.openvino_program import Hint, OpenVinoProgram


def with_onnxruntime(path: Path, *, chunked: bool) -> Program:
    session = session_from_onnx(path)
    chunk = ROWS_A_CORE * len(os.sched_getaffinity(0)) if chunked else max(BATCHES)

    def run(images: np.ndarray) -> np.ndarray:
        starts = range(0, len(images), chunk)
        return np.concatenate([session.run(["logits"], {"tensor": images[at : at + chunk]})[0] for at in starts])

    return run


def with_openvino(path: Path, hint: Hint) -> Program:
    return OpenVinoProgram(str(path), hint=hint).run


def add_programs(family: Family) -> None:
    hints: dict[str, Hint] = {"fp32": "f32"}
    if "avx512_bf16" in cpu_features():
        hints["bf16"] = "bf16"
    family.add("straight export", with_onnxruntime(family.saved("straight"), chunked=False), "fp32")
    for key in ("gmm", "plain"):
        suffix, path = "" if key == "gmm" else " plain", family.saved(key)
        family.add(f"onnxruntime{suffix}", with_onnxruntime(path, chunked=True), "fp32")
        for precision, hint in hints.items():
            name = "openvino" if precision == "fp32" else f"openvino:{precision}"
            family.add(f"{name}{suffix}", with_openvino(path, hint), precision)
    family.add("openvino:int8", with_openvino(family.saved("int8"), "f32"), "int8")


if __name__ == "__main__":
    graphs = ("straight", "gmm", "plain", "int8")
    main(__file__, str(__doc__), graphs=graphs, add_programs=add_programs, device="cpu")
