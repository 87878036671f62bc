"""Build an engine from an ONNX file.

The steps: check the options, build in a temporary folder, check the layers, and write the engine's folder (`card`).
If a step fails, the engine's folder is not written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.variants import Variant
from gmmvit_deploy.errors import EngineError, InputError
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.files.writing import new_file, new_folder, require_free, sha256_of_file
from gmmvit_deploy.graphs.folded import require_folded
from gmmvit_deploy.graphs.masks import with_masks_of_one
from gmmvit_deploy.graphs.quantize import projections_named
from gmmvit_deploy.graphs.weights import write_graph
from gmmvit_deploy.progress import OnProgress, ignore
from gmmvit_deploy.runtimes.engines._graph_source import GraphSource, source_from_onnx
from gmmvit_deploy.runtimes.engines.builder import BuiltPlan, build_plan
from gmmvit_deploy.runtimes.engines.card import (
    CARD_FILE,
    LAYERS_FILE,
    PLAN_FILE,
    Engine,
    EngineCard,
    MaskCost,
    open_engine,
)
from gmmvit_deploy.runtimes.engines.flavors import Flavor, refuse, visible_gpu
from gmmvit_deploy.runtimes.engines.layers import (
    AttentionProof,
    Layer,
    Miss,
    layers_from_text,
    prove_attentions,
    shares_of,
    unreached,
)
from gmmvit_deploy.runtimes.engines.options import BuildOptions, Profile, trtexec_line


def engine_from_bundle(
    bundle: Bundle,
    variant: Variant,
    options: BuildOptions,
    flavor: Flavor,
    *,
    out: Path | None = None,
    mask_cost: bool = False,
    log: Path | None = None,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> Engine:
    """Build an engine from a graph of a bundle, the folder that ``gmmvit export`` writes.

    out: the folder to write; None writes a folder in the bundle's ``engines/``.
    The other arguments and the errors are as in `engine_from_onnx`; also InputError for a bundle with several outputs,
    and ExportError when the graph computes a mask at run time.
    """
    if len(bundle.manifest.outputs) > 1:
        raise InputError(
            f"{bundle.path}: the network has {len(bundle.manifest.outputs)} outputs, "
            f"{' and '.join(bundle.manifest.output_names)}, and an engine has a single output",
            hint="export the checkpoint again with --outputs logits or --outputs features",
        )
    source = source_from_onnx(variant.path)
    if source.unfolded:
        require_folded(source.model.graph)
    manifest = bundle.manifest
    masks = variant.record.mask_sha256 if variant.record else {m.layer: m.constant_sha256 for m in manifest.masks}
    hashes = {"bundle": bundle.sha256, "checkpoint": manifest.checkpoint["sha256"], "onnx": variant.sha256}
    calibration = variant.record.calibration if variant.record else None
    left = (calibration or {}).get("recipe", {}).get("float32", ())
    source = replace(
        source,
        max_batch=manifest.max_batch,
        hashes=hashes,
        masks=masks,
        not_quantized=frozenset(projections_named(source.model.graph, left)),
    )
    target = out or bundle.path / "engines" / engine_name(options, flavor)
    return _build(source, options, flavor, target, mask_cost=mask_cost, log=log, force=force, on_progress=on_progress)


def engine_from_onnx(
    onnx: Path,
    options: BuildOptions,
    flavor: Flavor,
    *,
    out: Path,
    mask_cost: bool = False,
    log: Path | None = None,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> Engine:
    """Build an engine from any ONNX file with a single input whose first dimension is the batch.

    out: the folder to write.  force: replace an engine that exists at ``out``.
    mask_cost: also build the same graph without masks, and record in the card how both engines differ.
    log: the file to write the builder's log to, or None.
    Errors, each of which leaves ``out`` unchanged:
        InputError: the file is not a suitable graph, or the flavor (the installed TensorRT) does not support an option.
        EngineError: the build fails, or the engine does not meet ``options.require_fused`` or
        ``options.require_precision``.
        OutputError: ``out`` cannot be written.
    """
    source = replace(source_from_onnx(onnx), hashes={"onnx": sha256_of_file(onnx)})
    return _build(source, options, flavor, out, mask_cost=mask_cost, log=log, force=force, on_progress=on_progress)


def engine_name(options: BuildOptions, flavor: Flavor) -> str:
    """Return the folder name of an engine: precision, flavor and target, such as ``fp16-tensorrt-rtx-8.9``.

    The target is the compute capabilities in ``options``, or the name of the GPU of this machine.
    """
    gpu = visible_gpu()
    place = "+".join(options.capabilities) or (gpu.name.replace(" ", "-").lower() if gpu else "unknown")
    return f"{options.precision}-{flavor.name}-{place}"


def _build(
    source: GraphSource,
    options: BuildOptions,
    flavor: Flavor,
    out: Path,
    *,
    mask_cost: bool,
    log: Path | None,
    force: bool,
    on_progress: OnProgress,
) -> Engine:
    profiles = _profiles(source, options)
    refuse(options, flavor)
    require_free(out, force=force)
    build = partial(
        build_plan, options=options, profiles=profiles, flavor=flavor, tensor=source.tensor, shape=source.shape
    )
    with temporary_folder("build") as temporary:
        folder, twin = temporary / "engine", temporary / "twin"
        folder.mkdir()
        twin.mkdir()
        try:
            plan = build(source.path, folder=folder, on_progress=on_progress)
            layers = {target: layers_from_text(text) for target, text in plan.layers.items()}
            cost = None
            if mask_cost:
                build_twin = partial(
                    build,
                    folder=twin,
                    on_progress=lambda event: on_progress(replace(event, step=f"{event.step} (twin with M = 1)")),
                )
                cost = _mask_cost(source, plan, profiles, flavor, build=build_twin, onnx=temporary / "twin.onnx")
            card = _card(source, options, profiles, flavor, plan, layers, cost)
        finally:
            if log is not None and (folder / "build.log").exists():
                _copied(folder / "build.log", log)
        _require(card, options)
        if options.timing_cache is not None:
            _copied(plan.path.with_name("timing.cache"), options.timing_cache)
        with new_folder(out, force=force) as written:
            shutil.copyfile(plan.path, written / PLAN_FILE)
            listing = "".join(f"# {target}\n{text}\n" for target, text in plan.layers.items())
            (written / LAYERS_FILE).write_text(listing, encoding="utf-8")
            text = json.dumps(card.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            (written / CARD_FILE).write_text(text, encoding="utf-8")
    return open_engine(out)


def _profiles(source: GraphSource, options: BuildOptions) -> tuple[Profile, ...]:
    max_batch = source.max_batch or 64
    profiles = options.profiles or (Profile(minimum=1, optimum=min(8, max_batch), maximum=max_batch),)
    for profile in profiles:
        if source.max_batch is not None and profile.maximum > source.max_batch:
            raise InputError(
                f"profile {profile}: expected a maximum batch of at most {source.max_batch}, the limit of the bundle",
                hint=f"export the checkpoint again with --max-batch {profile.maximum}, or lower MAX in --batch",
            )
    return profiles


def _copied(source: Path, target: Path) -> None:
    with new_file(target, force=True) as file:
        file.write(source.read_bytes())


def _card(
    source: GraphSource,
    options: BuildOptions,
    profiles: tuple[Profile, ...],
    flavor: Flavor,
    plan: BuiltPlan,
    layers: Mapping[str, tuple[Layer, ...]],
    cost: MaskCost | None,
) -> EngineCard:
    gpu = visible_gpu()
    named = {target or (gpu.name if gpu else "this GPU"): target_layers for target, target_layers in layers.items()}
    proofs: list[AttentionProof] = []
    misses: list[Miss] = []
    for target, target_layers in named.items():
        proofs += prove_attentions(
            target_layers, source.attentions, target=target, profiles=len(profiles), head_dims=source.head_dims
        )
        misses += unreached(
            target_layers,
            source.roles,
            options.precision,
            target=target,
            profiles=len(profiles),
            not_quantized=source.not_quantized,
        )
    return EngineCard(
        sha256={"plan": sha256_of_file(plan.path), **source.hashes},
        masks=source.masks,
        precision=options.precision,
        flavor=flavor.name,
        tensorrt_version=flavor.version,
        target={
            "capabilities": list(options.capabilities) or ([gpu.capability] if gpu else []),
            "gpu": gpu.name if gpu and not options.capabilities else None,
            "driver": gpu.driver if gpu else None,
        },
        tensor={"name": source.tensor, "dtype": source.dtype, "shape": list(source.shape)},
        profiles=profiles,
        flags=options.flags(),
        trtexec=trtexec_line(
            options,
            profiles,
            onnx=source.path.name,
            tensor=source.tensor,
            shape=source.shape,
            rtx=flavor.name == "tensorrt-rtx",
        ),
        size_bytes=plan.path.stat().st_size,
        build_seconds=round(plan.seconds, 3),
        attentions=tuple(proofs),
        misses=tuple(misses),
        unjudged=source.unjudged,
        shares={target: shares_of(target_layers) for target, target_layers in named.items()},
        layers={
            target: [sum(layer.profile == profile for layer in target_layers) for profile in range(len(profiles))]
            for target, target_layers in named.items()
        },
        unfolded=source.unfolded,
        mask_cost=cost,
        versions={**tool_versions(), flavor.name: flavor.version},
    )


def _require(card: EngineCard, options: BuildOptions) -> None:
    problems = _not_fused(card) if options.require_fused else []
    problems += _not_reached(card) if options.require_precision else []
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise EngineError(
            f"the engine does not meet the requirements: {shown}",
            hint="no engine was written; build without --require-fused and --require-precision to keep the engine",
        )


def _not_fused(card: EngineCard) -> list[str]:
    if not card.attentions:
        return ["the graph has no attention"]
    return list(card.unfolded) + [
        f"{proof.name} is not a single kernel on {proof.target}, profile {proof.profile}: {proof.reason}"
        for proof in card.attentions
        if not proof.fused
    ]


def _not_reached(card: EngineCard) -> list[str]:
    unjudged = [f"the types of the products cannot be judged: {card.unjudged}"] if card.unjudged else []
    return unjudged + [
        f"{miss.node} runs in {miss.actual} on {miss.target}, profile {miss.profile}; expected {miss.expected}"
        for miss in card.misses
    ]


def _mask_cost(
    source: GraphSource,
    plan: BuiltPlan,
    profiles: tuple[Profile, ...],
    flavor: Flavor,
    *,
    build: Callable[[Path], BuiltPlan],
    onnx: Path,
) -> MaskCost:
    """Compare an engine with its twin, of the same graph with a scalar in place of every mask, written to ``onnx``."""
    write_graph(with_masks_of_one(source.model), onnx)
    twin = build(onnx)
    own, other = (layers_from_text(next(iter(built.layers.values()))) for built in (plan, twin))
    times = _times(source, profiles, flavor, plan, twin) if visible_gpu() else (None, None)
    return MaskCost(
        layers=len(own),
        twin_layers=len(other),
        kernels=sum(layer.precision is not None for layer in own),
        twin_kernels=sum(layer.precision is not None for layer in other),
        bytes=plan.path.stat().st_size,
        twin_bytes=twin.path.stat().st_size,
        milliseconds=times[0],
        twin_milliseconds=times[1],
    )


def _times(
    source: GraphSource, profiles: tuple[Profile, ...], flavor: Flavor, *plans: BuiltPlan
) -> tuple[dict[str, float], ...]:
    """Return batch size → median milliseconds, for each plan; the plans run in turn at each size."""
    import numpy as np

    from gmmvit_deploy.runtimes.engines.session import PlanSession

    def profile_of(batch: int) -> int:
        return next(index for index, profile in enumerate(profiles) if profile.minimum <= batch <= profile.maximum)

    sessions = [
        PlanSession(
            flavor.name, plan.path.read_bytes(), tensor=source.tensor, dtype=source.dtype, profile_of=profile_of
        )
        for plan in plans
    ]
    batches = sorted({batch for profile in profiles for batch in (profile.minimum, profile.optimum, profile.maximum)})
    medians: tuple[dict[str, float], ...] = tuple({} for _ in plans)
    for batch in batches:
        images = np.zeros((batch, *source.shape), source.dtype)
        for session, times in zip(sessions, medians, strict=True):
            times[str(batch)] = session.milliseconds(images)
    for session in sessions:
        session.close()
    return medians
