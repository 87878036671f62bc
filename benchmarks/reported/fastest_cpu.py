"""How much faster than PyTorch can each family be served on a CPU, and how near to the hardware is that?

The five models of the paper as its released code names them (32×32, 10 classes, GMM with K = 5 a head), random
weights. Side by side in one process:

    eager                      PyTorch, attention written as the released code of the family writes it
    straight export            the same module exported unfolded, in ONNX Runtime's own operators, as users do
                               without this project
    onnxruntime+kernels        our export in ONNX Runtime with our own attention kernel
    openvino+kernels[:type]    our export in OpenVINO with our own kernels, float32 or bf16; :int8 the Q/DQ graph
                               that `gmmvit convert` writes

Each of our programs is loaded three times, and every round runs a random copy: the place of the weights in memory makes
copies differ by up to 2 % in speed. Ratios are medians of the rounds' own ratios, with bootstrap intervals. Answers of
every program are compared with the limits of parity (`gmmvit_deploy/tolerances.py`) in the same run; a wrong answer
stops the script. The roofline, the best library on the model's own matrix products, is measured before and after each
family. `mask_cost.py` measures the mask's cost separately, because it is smaller than the intervals of these ratios.

    python benchmarks/reported/fastest_cpu.py [--rounds 15] [--family vit] [--output RESULT]
"""

from __future__ import annotations

from benchmarks.shared.cpu_programs import RUNNERS, cpu_program
from benchmarks.shared.side_by_side import Family, main
from gmmvit_deploy.runtime.onnxruntime import session_from_onnx

_COPIES = 3


def add_programs(family: Family) -> None:
    straight = session_from_onnx(family.saved("straight"))
    family.add("straight export", [lambda images: straight.run(["logits"], {"tensor": images})[0]], "fp32")
    for name, precision in {**RUNNERS, "openvino+kernels:int8": "int8"}.items():
        path = family.saved("int8" if precision == "int8" else "gmm")
        family.add(name, [cpu_program(path, name, precision) for _ in range(_COPIES)], precision)


if __name__ == "__main__":
    main(__file__, str(__doc__), graphs=("straight", "gmm", "int8"), add_programs=add_programs, device="cpu")
