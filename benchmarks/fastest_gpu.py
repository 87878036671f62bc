"""How much faster than PyTorch does each family run on a GPU, how near to the machine's limit, and at what mask cost?

The models, inputs, checks and limits are those of `fastest_cpu.py`. The programs run on the first GPU:

    eager               PyTorch on the GPU, in float32 without TF32; in the paper's families, with attention as in the
                        paper authors' code
    eager:type          the eager program in bf16 or fp16, with autocast
    compile[:type]      the eager program, compiled with torch.compile, in float32, bf16 and fp16
    straight onnxruntime-cuda
                        the straight export in ONNX Runtime's provider for CUDA, in float32 without TF32
    onnxruntime-cuda[:type]
                        our graphs in the same provider, in float32 and fp16
    tensorrt[:type]     engines built from our graphs in float32, fp16, bf16, int8 and, on GPUs with fp8, fp8, and run
                        as CUDA graphs
    … plain             the same program with the plain model, to measure the cost of the mask; absent for a system
                        without plain twin

The result states where PyTorch's logits in bf16 or fp16 are wrong, and what is missing or cannot be compiled. The
images are in the memory of the CPU, so the times include copies. The limit is PyTorch's best rate on the matrix
products.

    python benchmarks/fastest_gpu.py [--rounds 15] [--family vit] [--check] [--output FOLDER]
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.shared.families import as_released, compiled, eager
from benchmarks.shared.interleaved import Program
from benchmarks.shared.side_by_side import BATCHES, Family, main
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_onnx
from gmmvit_deploy.runtimes.engines.flavors import find_flavor, visible_gpu
from gmmvit_deploy.runtimes.engines.options import BuildOptions, Profile
from gmmvit_deploy.runtimes.engines.session import PlanSession
from gmmvit_deploy.runtimes.programs.onnxruntime_providers import (
    CUDA,
    BoundProgram,
    require_provider,
    session_on_providers,
)
from gmmvit_deploy.runtimes.runners.onnxruntime import CUDA_OPTIONS

_OF_PYTORCH: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
_FP8_CAPABILITY = (8, 9)
PROFILES = tuple(Profile(minimum=batch, optimum=batch, maximum=batch) for batch in BATCHES)


def with_tensorrt(family: Family, graph: str, precision: Precision) -> Program:
    """Build an engine of the installed flavor on this GPU, with an optimisation profile for each batch."""
    flavor = find_flavor("auto")
    options = BuildOptions(precision=precision, profiles=PROFILES)
    engine = engine_from_onnx(family.saved(graph), options, flavor, out=family.folder / f"{graph}-engine")
    session = PlanSession(
        flavor.name,
        engine.plan_path.read_bytes(),
        tensor=str(engine.card.tensor["name"]),
        dtype=str(engine.card.tensor["dtype"]),
        profile_of=engine.card.profile_for,
    )
    return session.run


def in_onnxruntime(family: Family, graph: str) -> Program:
    """Load a graph in ONNX Runtime's provider for CUDA.  Errors: GmmvitError when this machine has no such provider."""
    require_provider(CUDA)
    session, _ = session_on_providers(family.saved(graph), graph, {CUDA: CUDA_OPTIONS})
    return BoundProgram(session, memory="cuda").run


def add_onnxruntime(family: Family) -> None:
    family.add_straight("straight onnxruntime-cuda", partial(in_onnxruntime, family, "straight"), "fp32")
    for key in family.models:
        suffix = "" if key == "trained" else " plain"
        of_type: list[tuple[str, str, Precision]] = [("", key, "fp32"), (":fp16", f"{key}_fp16", "fp16")]
        for precision_suffix, graph, precision in of_type:
            family.add_if_here(
                f"onnxruntime-cuda{precision_suffix}{suffix}", partial(in_onnxruntime, family, graph), precision
            )


def add_pytorch(family: Family) -> None:
    """Add the programs of PyTorch, which users without this project run."""
    torch.compiler.reset()  # PyTorch compiles a function only for a limited number of models
    released = as_released(family.models["trained"][0]).cuda()
    for precision in _OF_PYTORCH:
        suffix = "" if precision == "fp32" else f":{precision}"
        if precision != "fp32":
            family.add_straight(f"eager{suffix}", partial(eager, released, "gpu", precision), precision)
        load = partial(compiled, released, family.image_shape, "gpu", precision)
        family.add_straight(f"compile{suffix}", load, precision)


def engines_of(family: Family, capability: tuple[int, int]) -> list[tuple[str, str, Precision]]:
    """Return (program, graph, precision) of each engine that a GPU of this compute capability runs; fp8 needs 8.9."""
    engines: list[tuple[str, str, Precision]] = []
    for key in family.models:
        suffix = "" if key == "trained" else " plain"
        engines += [(f"tensorrt{suffix}", key, "fp32"), (f"tensorrt:fp16{suffix}", f"{key}_fp16", "fp16")]
    engines += [("tensorrt:bf16", "trained_bf16", "bf16"), ("tensorrt:int8", "int8", "int8")]
    return [*engines, ("tensorrt:fp8", "fp8", "fp8")] if capability >= _FP8_CAPABILITY else engines


def add_programs(family: Family) -> None:
    add_pytorch(family)
    add_onnxruntime(family)
    for name, graph, precision in engines_of(family, torch.cuda.get_device_capability()):
        family.add_if_here(name, partial(with_tensorrt, family, graph, precision), precision)


if __name__ == "__main__":
    if visible_gpu() is None or not torch.cuda.is_available():
        raise SystemExit("nothing was measured: expected a GPU that both nvidia-smi and PyTorch can use")
    graphs = ("trained", "plain", "trained_fp16", "plain_fp16")  # `Family.saved` makes the others when they are needed
    try:
        main(
            __file__,
            str(__doc__),
            graphs=graphs,
            add_programs=add_programs,
            device="gpu",
            checked_alone=("onnxruntime-cuda", "onnxruntime-cuda:fp16", "tensorrt", "tensorrt:fp16"),
        )
    except GmmvitError as exc:
        raise SystemExit(str(exc)) from exc
