"""How much faster than PyTorch does each family run on a GPU, how near to the machine's limit, and at what mask cost?

The models, inputs, checks and limits are the same as in `fastest_cpu.py`. The programs run on the first GPU of this
machine:

    eager               PyTorch on the GPU, in float32 without TF32; in the paper's families, with attention as in the
                        paper authors' code
    compile             the eager program, compiled with torch.compile
    tensorrt[:type]     engines built from our graphs in float32, fp16 and int8, and run as CUDA graphs
    … plain             the same program with the plain model, to measure the cost of the mask; absent for a system
                        without plain twin

The images are in the memory of the CPU, so the times include copies to and from the GPU. The machine's limit is the
roofline: PyTorch's best rate on the GPU for the matrix products of the model.

    python benchmarks/reported/fastest_gpu.py [--rounds 15] [--family vit] [--check] [--output FOLDER]
"""

from __future__ import annotations

import torch

from benchmarks.shared.families import as_released, eager
from benchmarks.shared.side_by_side import BATCHES, Family, main
from gmmvit_deploy.bench.interleaved import Program
from gmmvit_deploy.engines.engine_from_onnx import engine_from_onnx
from gmmvit_deploy.engines.flavors import find_flavor, visible_gpu
from gmmvit_deploy.engines.options import BuildOptions, Profile
from gmmvit_deploy.engines.session import PlanSession
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.precision import Precision

PROFILES = tuple(Profile(least=batch, best=batch, most=batch) for batch in BATCHES)


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


def add_programs(family: Family) -> None:
    if family.selects("compile"):
        released = as_released(family.models["trained"][0])
        family.add("compile", [eager(torch.compile(released.cuda(), dynamic=True), "gpu")], "fp32")
    engines: list[tuple[str, str, Precision]] = []
    for key in family.models:
        suffix = "" if key == "trained" else " plain"
        engines += [(f"tensorrt{suffix}", key, "fp32"), (f"tensorrt:fp16{suffix}", f"{key}_fp16", "fp16")]
    for name, graph, precision in (*engines, ("tensorrt:int8", "int8", "int8")):
        if family.selects(name):
            family.add(name, [with_tensorrt(family, graph, precision)], precision)


if __name__ == "__main__":
    if visible_gpu() is None or not torch.cuda.is_available():
        raise SystemExit("nothing was measured: expected a GPU that both nvidia-smi and PyTorch can use")
    graphs = ("trained", "plain", "trained_fp16", "plain_fp16", "int8")
    try:
        main(__file__, str(__doc__), graphs=graphs, add_programs=add_programs, device="gpu")
    except GmmvitError as exc:
        raise SystemExit(str(exc)) from exc
