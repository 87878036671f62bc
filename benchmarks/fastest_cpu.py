"""How much faster than PyTorch does each family run on a CPU, and how near is this speed to the machine's limit?

The models are the paper's five models (32×32, 10 classes, GMM with K = 5 a head, random weights) and the systems of
`benchmarks/shared/systems.py`, some smaller than their presets. All programs of a model take turns in one process:

    eager                      PyTorch; in the paper's families, with attention written as in the paper authors' code
    torch.compile[:bf16]       the eager program, compiled with torch.compile for each batch size; bf16 with autocast
    straight export            the same module exported without folding and run with ONNX Runtime's built-in operators,
                               as users do without this project
    straight openvino[:bf16]   the graph of the straight export in OpenVINO, compiled for each batch size
    nncf openvino:int8         with ``--nncf``: the same graph, quantised by NNCF as its pages show
    openvino+kernels[:type]    our export in OpenVINO with our kernels, in float32, bf16 or int8 (as gmmvit convert
                               writes it for CPUs); without ``+kernels`` where they compute no part of the model

Each of our programs is loaded three times, and every round runs a random copy, because the place of the weights in
memory makes copies differ by up to 2 % in speed. The logits of every program are compared with the limits of parity in
the same run: wrong logits of ours stop the script, and those of users' programs exclude these from *best_straight*, the
fastest in the same precision at that batch size. NNCF's logits are not judged; its attention is computed in float32,
and that of our int8 in bf16 if the CPU has bf16.

The machine's limit is the roofline: the best rate of any library on the matrix products of the model, measured before
and after each model. `mask_cost.py` measures the cost of the mask, which is smaller than the intervals of these ratios.

    python benchmarks/fastest_cpu.py [--rounds 15] [--family vit] [--nncf PYTHON] [--check] [--output FOLDER]
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.shared.cpu_programs import (
    HAS_BF16,
    RUNNERS,
    cpu_program,
    nncf_in_openvino,
    runner_of,
    straight_openvino,
)
from benchmarks.shared.families import as_released, compiled
from benchmarks.shared.interleaved import Program
from benchmarks.shared.side_by_side import Family, main
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_onnx

_COPIES = 3
_IN_INT8: dict[str, Precision] = {"openvino+kernels:int8": "int8"}
_STRAIGHT: tuple[Precision, ...] = ("fp32", "bf16") if HAS_BF16 else ("fp32",)


def straight_onnxruntime(family: Family) -> Program:
    session = session_from_onnx(family.saved("straight"))
    return lambda images: session.run(["logits"], {"tensor": images})[0]


def straight_in_openvino(family: Family, precision: Precision) -> Program:
    return straight_openvino(family.saved("straight"), precision)


def add_straight(family: Family) -> None:
    """Add the programs that users without this project run."""
    torch.compiler.reset()  # PyTorch compiles a function only for a limited number of models
    model = as_released(family.models["trained"][0])
    family.add_straight("straight export", partial(straight_onnxruntime, family), "fp32")
    for precision in _STRAIGHT:
        suffix = "" if precision == "fp32" else f":{precision}"
        load = partial(compiled, model, family.image_shape, precision=precision)
        family.add_straight(f"torch.compile{suffix}", load, precision)
        load = partial(straight_in_openvino, family, precision)
        family.add_straight(f"straight openvino{suffix}", load, precision)
    if family.nncf:
        family.add_straight(
            "nncf openvino:int8",
            partial(nncf_in_openvino, family.saved("straight"), family.image_shape, family.nncf),
            "int8",
        )


def add_programs(family: Family) -> None:
    add_straight(family)
    for name, precision in {**RUNNERS, **_IN_INT8}.items():
        path = family.saved("int8_cpu" if precision == "int8" else "trained")
        runner, reason = runner_of(path, name, precision)
        asked = [family.selects(each) for each in dict.fromkeys((name, runner))]  # either name selects the program
        if not any(asked):
            continue
        if reason:
            family.without_kernels[runner] = reason
        family.add(runner, [cpu_program(path, runner, precision) for _ in range(_COPIES)], precision)


if __name__ == "__main__":
    main(
        __file__,
        str(__doc__),
        graphs=("trained", "int8_cpu"),
        add_programs=add_programs,
        device="cpu",
        checked_alone=("straight export", "openvino+kernels"),
    )
