"""Measure the cost of the masks in an engine: compare the engine with its twin.

The twin is an engine of the same graph in which a scalar replaces every mask.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gmmvit_deploy.graphs.masks import with_masks_of_one
from gmmvit_deploy.graphs.weights import write_graph
from gmmvit_deploy.runtimes.engines._graph_source import GraphSource
from gmmvit_deploy.runtimes.engines.builder import BuiltPlan
from gmmvit_deploy.runtimes.engines.card import MaskCost
from gmmvit_deploy.runtimes.engines.flavors import Flavor, visible_gpu
from gmmvit_deploy.runtimes.engines.options import Profile
from gmmvit_deploy.runtimes.engines.proof import Layer, layers_from_text


def mask_cost_of(
    source: GraphSource,
    plan: BuiltPlan,
    profiles: tuple[Profile, ...],
    flavor: Flavor,
    *,
    build: Callable[[Path], BuiltPlan],
    onnx: Path,
) -> MaskCost:
    """Build the twin, and count the layers, GPU kernels and bytes of both engines; with a GPU, also measure the times.

    plan: the engine's plan, the file that TensorRT loads.
    build: a function that builds a plan from an ONNX file.  onnx: the file to write the twin's graph to.
    Errors: EngineError when the build of the twin fails.
    """
    write_graph(with_masks_of_one(source.proto), onnx)
    twin = build(onnx)
    mine, its = (layers_from_text(next(iter(built.layers.values()))) for built in (plan, twin))
    times = _times(source, profiles, flavor, plan, twin) if visible_gpu() else (None, None)
    return MaskCost(
        layers=len(mine),
        twin_layers=len(its),
        kernels=_kernels(mine),
        twin_kernels=_kernels(its),
        bytes=plan.path.stat().st_size,
        twin_bytes=twin.path.stat().st_size,
        milliseconds=times[0],
        twin_milliseconds=times[1],
    )


def _kernels(layers: tuple[Layer, ...]) -> int:
    return sum(layer.precision is not None for layer in layers)


def _times(
    source: GraphSource, profiles: tuple[Profile, ...], flavor: Flavor, *plans: BuiltPlan
) -> tuple[dict[str, float], ...]:
    """Return batch size → median milliseconds, for each plan.

    All plans run with a batch size before any plan runs with the next batch size.
    """
    import numpy as np

    from gmmvit_deploy.runtimes.engines.session import PlanSession

    def profile_of(batch: int) -> int:
        return next(index for index, profile in enumerate(profiles) if profile.least <= batch <= profile.most)

    sessions = [
        PlanSession(
            flavor.name,
            plan.path.read_bytes(),
            tensor=source.tensor,
            dtype=source.dtype,
            profile_of=profile_of,
        )
        for plan in plans
    ]
    batches = sorted({batch for profile in profiles for batch in (profile.least, profile.best, profile.most)})
    medians: tuple[dict[str, float], ...] = tuple({} for _ in plans)
    for batch in batches:
        images = np.zeros((batch, *source.shape), source.dtype)
        for session, times in zip(sessions, medians, strict=True):
            times[str(batch)] = session.milliseconds(images)
    for session in sessions:
        session.close()
    return medians
