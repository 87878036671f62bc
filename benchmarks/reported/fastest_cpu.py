"""How much faster than PyTorch does each family run on a CPU, and how near is this speed to the machine's limit?

The models are the paper's five models, as the paper authors' code names them (32×32, 10 classes, GMM with K = 5 a
head, random weights). All programs of a family run in the same process, and take turns in each round:

    eager                      PyTorch, with attention written as in the paper authors' code
    straight export            the same module exported without folding and run with ONNX Runtime's built-in operators,
                               as users do without this project
    onnxruntime+kernels        our export in ONNX Runtime with our attention kernel
    openvino+kernels[:type]    our export in OpenVINO with our kernels, in float32 or bf16; for int8, the quantised
                               graph that `gmmvit convert` writes

Each of our programs is loaded three times, and every round runs a random copy, because the place of the weights in
memory makes copies differ by up to 2 % in speed. A ratio is the median of the ratios within each round, with a
bootstrap interval. The logits of every program are compared with the limits of parity (`gmmvit_deploy/tolerances.py`)
in the same run, and wrong logits stop the script. The machine's limit is the roofline: the best rate of any library on
the matrix products of the model. The roofline is measured before and after each family. `mask_cost.py` measures the
cost of the mask separately, because this cost is smaller than the intervals of these ratios.

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
