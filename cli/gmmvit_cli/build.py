from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.output import JSON_OPTION, phases, print_json, print_table
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.engines.card import Engine, EngineCard


def build(
    source: Path = typer.Argument(metavar="BUNDLE", help="A bundle that gmmvit export wrote, or an ONNX file."),
    out: Path | None = typer.Option(None, "-o", "--output", help="The engine to write; BUNDLE/engines/… by default."),
    flavor: str = typer.Option("auto", help="tensorrt (on the GPU that is here), tensorrt-rtx (anywhere), or auto."),
    precision: str = typer.Option("fp16", help="fp32, fp16, bf16, int8 or fp8, as gmmvit convert wrote it."),
    batch: list[str] = typer.Option([], help="least:best:most, such as 1:8:64; once for each profile."),
    compute_capability: list[str] = typer.Option([], help="What to build for, such as 8.9; once for each."),
    optimization_level: int | None = typer.Option(None, min=0, max=5, help="0 builds fastest, 5 searches longest."),
    timing_cache: Path | None = typer.Option(None, help="Read if it is there, written afterwards."),
    version_compatible: bool = typer.Option(False, help="Load in later versions of TensorRT too."),
    hardware_compatible: str = typer.Option("none", help="none, ampere+ or same-cc."),
    tf32: bool = typer.Option(False, help="Let float32 products drop 13 bits of their inputs."),
    workspace_mib: int | None = typer.Option(None, min=1, help="What kernels may use beside weights, in MiB."),
    require_fused: bool = typer.Option(False, help="Fail unless every attention is one kernel."),
    require_precision: bool = typer.Option(False, help="Fail unless every product runs in the precision's type."),
    mask_cost: bool = typer.Option(False, help="Build the twin with M = 1 as well, and compare."),
    log: Path | None = typer.Option(None, help="Keep everything that the builder says in this file."),
    force: bool = typer.Option(False, "--force", help="Replace the engine if it exists."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Build a TensorRT engine, and its card: what is inside, read from the build and not from the graph."""
    with phases("starting") as told:
        from gmmvit_deploy.artifacts import open_bundle
        from gmmvit_deploy.engines.engine_from_onnx import engine_from_bundle, engine_from_onnx
        from gmmvit_deploy.engines.flavors import find_flavor
        from gmmvit_deploy.engines.options import BuildOptions, profile_from
        from gmmvit_deploy.precision import precision_from
        from gmmvit_deploy.variants import open_variant

        options = BuildOptions(
            precision=precision_from(precision),
            profiles=tuple(profile_from(text) for text in batch),
            capabilities=tuple(compute_capability),
            optimization_level=optimization_level,
            timing_cache=timing_cache,
            version_compatible=version_compatible,
            hardware_compatible=hardware_compatible,  # type: ignore[arg-type]  # checked there
            tf32=tf32,
            workspace_mib=workspace_mib,
            require_fused=require_fused,
            require_precision=require_precision,
        )
        found = find_flavor(flavor)
        if source.suffix == ".onnx":
            if out is None:
                raise InputError("an ONNX file has no place for engines", hint="-o ENGINE says where to")
            engine = engine_from_onnx(
                source, options, found, out=out, mask_cost=mask_cost, log=log, force=force, on_progress=told
            )
        else:
            bundle = open_bundle(source)
            variant = open_variant(bundle, options.precision)
            engine = engine_from_bundle(
                bundle, variant, options, found, out=out, mask_cost=mask_cost, log=log, force=force, on_progress=told
            )
    if as_json:
        print_json({"engine": str(engine.path), "card": engine.card.to_json()})
        return
    print_card(engine)
    typer.echo(engine.path)


def print_card(engine: Engine) -> None:
    """The card on the terminal."""
    card = engine.card
    target = ", ".join(card.target["capabilities"])
    if card.target["gpu"]:
        target = f"{card.target['gpu']} ({target}), driver {card.target['driver']}"
    flags = [f"{name}={value}" for name, value in card.flags.items() if value not in (None, False, "none")]
    rows = [
        ("engine", f"{card.precision}, {card.flavor} {card.tensorrt_version}, for {target}"),
        ("profiles", ", ".join(map(str, card.profiles))),
        ("input", f"{card.tensor['name']}: {card.tensor['dtype']} (B, {', '.join(map(str, card.tensor['shape']))})"),
        ("size", f"{card.size_bytes / 2**20:.2f} MiB, built in {card.build_seconds:.1f} s"),
        ("flags", ", ".join(flags) or "none; TF32 off"),
        *_proof_rows(card),
        ("masks", f"{len(card.masks)} constants; the SHA-256 of each is in card.json"),
        *((f"{name} SHA-256", digest) for name, digest in card.sha256.items()),
        ("trtexec", card.trtexec),
    ]
    print_table(("", ""), rows)
    print_table(
        ("attention", "on", "profile", "one kernel", "products", "kernel, or why not"),
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


def _proof_rows(card: EngineCard) -> list[tuple[str, str]]:
    fused = sum(proof.fused for proof in card.attentions)
    rows = [("attention", f"{fused} of {len(card.attentions)} are one kernel each")]
    if card.unjudged:
        rows.append(("precision", f"NOT judged: {card.unjudged}"))
    elif card.misses:
        first = card.misses[0]
        rows.append(("precision", f"NOT reached by {len(card.misses)} products: {first.node} runs in {first.found}"))
    else:
        rows.append(("precision", "reached by every product"))
    for target, shares in card.shares.items():
        text = ", ".join(f"{share:.0%} {kind}" for kind, share in shares.items())
        rows.append((f"layers, {target}", f"{'+'.join(map(str, card.layers[target]))}: {text}"))
    if card.mask_cost:
        cost = card.mask_cost
        rows.append(
            (
                "mask costs",
                f"{cost.kernels - cost.twin_kernels} kernels and {cost.bytes - cost.twin_bytes:,} bytes "
                f"(M = 1: {cost.twin_kernels} kernels, {cost.twin_bytes:,} bytes)",
            )
        )
    rows += [("unfolded", what) for what in card.unfolded]
    return rows
