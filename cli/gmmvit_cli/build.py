from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.options import AS_JSON, of_fields
from gmmvit_cli.output import print_json, print_table
from gmmvit_cli.panels import INPUT, OUTPUT, PRECISION, Panel, listed, output_option, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_deploy.inference.precision import PRECISIONS, Precision
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS
from gmmvit_deploy.runtimes.engines.options import (
    HARDWARE_COMPATIBILITIES,
    HardwareCompatibility,
    Profile,
    profile_from,
)

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.engines.card import Engine, EngineCard

COLLECTS = True
EXAMPLE = """gmmvit build bundle --precision fp16 --compute-capability 8.9
gmmvit build bundle --batch 1 --batch 2:8:64 --require-fused"""

_ENGINE, _CHECKS = Panel("Engine"), Panel("Checks")


def _profiles_from(texts: list[str]) -> list[Profile]:
    return list(map(profile_from, texts))


def build(
    context: typer.Context,
    source: Path = INPUT.argument("BUNDLE", "A bundle (the folder that gmmvit export writes), or an ONNX file."),
    timing_cache: Path | None = INPUT.option(
        "FILE",
        "TensorRT's timing cache, which shortens later builds: read if it exists, written after the build. "
        "Only with flavor tensorrt.",
    ),
    precision: Precision = PRECISION.option(
        "NAME",
        f"Precision of the engine: {listed(PRECISIONS)}. Except for fp32, first write the bundle's graph in this "
        "precision with gmmvit convert.",
        default="fp16",
        names=PRECISIONS,
    ),
    tf32: bool = PRECISION.flag(
        "--tf32/--no-tf32",
        "Let matrix products round float32 inputs to TF32 (10 instead of 23 mantissa bits). Only with fp32.",
    ),
    flavor: str = _ENGINE.option(
        "NAME",
        "TensorRT package. tensorrt: builds on the GPU that will run the engine. tensorrt-rtx: builds on any "
        "machine, also without a GPU. auto: tensorrt if it is installed and a GPU is present, else tensorrt-rtx.",
        default="auto",
        names=("auto", *FLAVORS),
    ),
    batch: list[Profile] | None = _ENGINE.option(
        "MIN:OPT:MAX",
        "Batch sizes that the engine accepts (an optimisation profile): the smallest, the size to optimise for, "
        "and the largest, such as 1:8:64. A single number fixes the batch size. May be repeated.",
        default=[],
        parser=_profiles_from,
        show_default="1:8:N, N being the largest batch of the bundle",
    ),
    compute_capability: list[str] = _ENGINE.option(
        "X.Y",
        "Compute capability (NVIDIA's version number of a GPU architecture) to build for, such as 8.9. May "
        "be repeated with tensorrt-rtx.",
        default=[],
        show_default="of this machine's GPU",
    ),
    optimization_level: int | None = _ENGINE.option(
        "N", "How long TensorRT searches for fast kernels: 0 is the fastest build, 5 the longest search.", min=0, max=5
    ),
    version_compatible: bool = _ENGINE.flag(
        "--version-compatible/--no-version-compatible",
        "Let later TensorRT releases of the same major version load the engine. Only with flavor tensorrt.",
    ),
    hardware_compatible: HardwareCompatibility = _ENGINE.option(
        "MODE",
        f"Other GPUs that can run the engine: {listed(HARDWARE_COMPATIBILITIES)}. ampere+ is Ampere and later; "
        "same-cc is GPUs of the same compute capability. Only with flavor tensorrt.",
        default="none",
        names=HARDWARE_COMPATIBILITIES,
    ),
    workspace_mib: int | None = _ENGINE.option(
        "MIB",
        "Maximum GPU memory for kernels, in MiB, not counting weights and activations.",
        min=1,
        show_default="all memory of the GPU",
    ),
    require_fused: bool = _CHECKS.flag(
        "--require-fused/--no-require-fused", "Fail unless a single GPU kernel computes each attention."
    ),
    require_precision: bool = _CHECKS.flag(
        "--require-precision/--no-require-precision",
        "Fail unless every matrix product and convolution runs in the data type that the precision prescribes.",
    ),
    mask_cost: bool = _CHECKS.flag(
        "--mask-cost/--no-mask-cost",
        "Report what the masks cost. The command builds a second engine whose mask entries are all 1, so that the "
        "masks have no effect, and compares the number of GPU kernels, the size and, if a GPU is present, the time.",
    ),
    out: Path | None = output_option(
        "ENGINE",
        "Folder to write the engine to. Required for an ONNX file.",
        default=None,
        show_default="BUNDLE/engines/NAME",
    ),
    log: Path | None = OUTPUT.option("FILE", "Write TensorRT's complete build log to this file."),
    force: bool = OUTPUT.flag("--force", "Replace the engine if it exists."),
    as_json: bool = AS_JSON,
) -> None:
    """The report is read from the finished engine and lists the GPU kernels and data types of each attention layer. The
    command prints the report and stores it as card.json in the folder of the engine.
    """
    refusals = refusals_of(context)
    refusals.refuse(
        source.suffix == ".onnx" and out is None,
        "--output, the folder to write the engine to, is required for an ONNX file",
        hint=f"type gmmvit build {source} -o ENGINE",
    )
    with progress("build") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.bundle.variants import open_variant
        from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_bundle, engine_from_onnx
        from gmmvit_deploy.runtimes.engines.flavors import find_flavor
        from gmmvit_deploy.runtimes.engines.options import BuildOptions

        with refusals.collected():
            options = BuildOptions(
                profiles=tuple(batch or ()),
                capabilities=tuple(compute_capability),
                **of_fields(BuildOptions, context.params),
            )
        with refusals.collected():
            bundle = None if source.suffix == ".onnx" else open_bundle(source)
        with refusals.collected():
            library = find_flavor(flavor)
        refusals.raise_all()
        how: dict[str, Any] = {"mask_cost": mask_cost, "log": log, "force": force, "on_progress": on_progress}
        if bundle is not None:
            engine = engine_from_bundle(bundle, open_variant(bundle, precision), options, library, out=out, **how)
        elif out is not None:
            engine = engine_from_onnx(source, options, library, out=out, **how)
    if as_json:
        print_json({"engine": str(engine.path), "card": engine.card.to_json()})
    else:
        print_card(engine)
        typer.echo(engine.path)


def print_card(engine: Engine) -> None:
    """Print the card of an engine as tables on the terminal."""
    card = engine.card
    rows = [
        *_facts(card),
        *_proof_rows(card),
        *([("masks", f"{len(card.masks)} constants; the SHA-256 of each is in card.json")] if card.masks else []),
        *((f"{name} SHA-256", digest) for name, digest in card.sha256.items()),
        ("trtexec", card.trtexec),
    ]
    print_table(("", ""), rows)
    print_table(
        ("attention", "target", "profile", "single kernel", "data types", "kernel, or why not a single kernel"),
        [
            (
                proof.name,
                proof.target,
                str(proof.profile),
                "yes" if proof.fused else "NO",
                proof.precision,
                proof.reason or ", ".join(proof.kernels),
            )
            for proof in card.attentions
        ],
    )


def _facts(card: EngineCard) -> list[tuple[str, str]]:
    target = ", ".join(card.target["capabilities"])
    if card.target["gpu"]:
        target = f"{card.target['gpu']} ({target}), driver {card.target['driver']}"
    flags = [f"{name}={value}" for name, value in card.flags.items() if value not in (None, False, "none")]
    shape = ", ".join(map(str, card.tensor["shape"]))
    return [
        ("precision", card.precision),
        ("built for", f"{target}, with {card.flavor} {card.tensorrt_version}"),
        ("profiles", f"{', '.join(map(str, card.profiles))} (minimum, optimum and maximum batch)"),
        ("input", f"{card.tensor['name']}: {card.tensor['dtype']} (B, {shape})"),
        ("size", f"{card.size_bytes / 2**20:.2f} MiB, built in {card.build_seconds:.1f} s"),
        ("flags", ", ".join(flags) or "TF32 off"),
    ]


def _proof_rows(card: EngineCard) -> list[tuple[str, str]]:
    fused = sum(proof.fused for proof in card.attentions)
    rows = [("attention", f"{fused} of {len(card.attentions)} attentions run as a single kernel")]
    if card.unjudged:
        rows.append(("data types", f"NOT checked: {card.unjudged}"))
    elif card.misses:
        first = card.misses[0]
        rows.append(
            (
                "data types",
                f"NOT reached by {len(card.misses)} operators: for example, {first.node} runs in {first.actual}",
            )
        )
    else:
        rows.append(("data types", "every matrix product and convolution runs in the prescribed data type"))
    for target, shares in card.shares.items():
        text = ", ".join(f"{share:.0%} {kind}" for kind, share in shares.items())
        rows.append((f"layers, {target}", f"{' + '.join(map(str, card.layers[target]))} layers: {text}"))
    if card.mask_cost:
        cost = card.mask_cost
        rows.append(
            (
                "mask cost",
                f"{cost.kernels - cost.twin_kernels} kernels and {cost.bytes - cost.twin_bytes:,} bytes "
                f"more than with every mask entry 1 ({cost.twin_kernels} kernels, {cost.twin_bytes:,} bytes)",
            )
        )
    rows += [("not folded", what) for what in card.unfolded]
    return rows
