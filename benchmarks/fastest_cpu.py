"""How much faster than PyTorch can each family be served on a CPU, how near to the hardware, and is a mask free?

The five models of the paper as its released code names them (32×32, 10 classes, GMM with K = 5 a head), random
weights, and their plain twins with the same weights and no mask. Side by side in one process:

    eager              PyTorch, attention as the released code writes it (Einsum)
    straight export    the same module exported unfolded, in ONNX Runtime: what one has without this project
    onnxruntime        our export in ONNX Runtime, as our runner runs it, with our own attention kernel
    openvino[:type]    our export in OpenVINO, float32 or bf16, the same way; :int8 the Q/DQ graph that
                       `gmmvit convert` writes
    … plain            the twin of the same, for what the mask costs

Our programs are there three times each, and every round takes one of them: by where its weights lie in memory one copy
is up to 2 % faster than another. Ratios are medians of the rounds' own ratios, with bootstrap intervals. Answers of
every program are held to the limits of parity (`gmmvit_deploy/tolerances.py`) in the same run; a wrong one stops the
script. The roofline is measured right before each family: the best library on the model's own matrix products.

    python benchmarks/fastest_cpu.py [--rounds 15] [--output benchmarks/results/fastest_cpu.json]
"""

from __future__ import annotations

from pathlib import Path

from interleaved import Program
from side_by_side import Family, main

from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.onnxruntime import fused_graph, program_from_onnx, session_from_onnx
from gmmvit_deploy.runtime.openvino import OPENVINO_HINTS, our_kernels
from gmmvit_deploy.runtime.openvino_program import OpenVinoProgram

_COPIES = 3


def with_openvino(path: Path, precision: Precision) -> list[Program]:
    kernels = our_kernels(precision)[0]
    hint = OPENVINO_HINTS[precision]
    return [OpenVinoProgram(str(path), hint=hint, kernels=kernels).run for _ in range(_COPIES)]


def add_programs(family: Family) -> None:
    precisions: list[Precision] = ["fp32", "bf16"] if "avx512_bf16" in cpu_features() else ["fp32"]
    straight = session_from_onnx(family.saved("straight"))
    family.add("straight export", [lambda images: straight.run(["logits"], {"tensor": images})[0]], "fp32")
    for key in ("gmm", "plain"):
        suffix, path = "" if key == "gmm" else " plain", family.saved(key)
        fused = fused_graph(path)[0]
        family.add(f"onnxruntime{suffix}", [program_from_onnx(path, fused=fused).run for _ in range(_COPIES)], "fp32")
        for precision in precisions:
            name = "openvino" if precision == "fp32" else f"openvino:{precision}"
            family.add(f"{name}{suffix}", with_openvino(path, precision), precision)
    family.add("openvino:int8", with_openvino(family.saved("int8"), "int8"), "int8")


if __name__ == "__main__":
    graphs = ("straight", "gmm", "plain", "int8")
    main(__file__, str(__doc__), graphs=graphs, add_programs=add_programs, device="cpu")
