from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.choices import choice_from, complete, listed, read_by
from gmmvit_cli.options import INPUT, OUTPUT, PRECISION, require_output, require_output_file
from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table
from gmmvit_cli.progress import progress
from gmmvit_deploy.engines.flavors import FLAVORS, require_flavor
from gmmvit_deploy.engines.options import HARDWARE_COMPATIBILITIES
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.precision import PRECISIONS, precision_from

if TYPE_CHECKING:
    from gmmvit_deploy.engines.card import Engine, EngineCard

EXAMPLE = """gmmvit build bundle --precision fp16 --compute-capability 8.9
gmmvit build bundle --batch 1 --batch 2:8:64 --require-fused"""

_ENGINE, _CHECKS = "Engine", "Checks"
_FLAVORS = ("auto", *FLAVORS)


def build(
    source: Path = typer.Argument(
        metavar="BUNDLE", rich_help_panel=INPUT, help="A bundle that gmmvit export wrote, or an ONNX file."
    ),
    timing_cache: Path | None = typer.Option(
        None, metavar="FILE", rich_help_panel=INPUT, help="Timings of kernels: read if the file exists, then written."
    ),
    precision: str = typer.Option(
        "fp16",
        metavar="NAME",
        rich_help_panel=PRECISION,
        help=f"{listed(PRECISIONS)}; the graph must be in the bundle (gmmvit convert).",
        callback=read_by(precision_from),
        autocompletion=complete(lambda: PRECISIONS),
    ),
    tf32: bool = typer.Option(
        False, rich_help_panel=PRECISION, help="Let float32 products drop 13 bits of their inputs."
    ),
    flavor: str = typer.Option(
        "auto",
        metavar="NAME",
        rich_help_panel=_ENGINE,
        help="tensorrt (builds on the GPU of this machine), tensorrt-rtx (builds anywhere) or auto.",
        callback=read_by(require_flavor),
        autocompletion=complete(lambda: _FLAVORS),
    ),
    batch: list[str] = typer.Option(
        [], metavar="LEAST:BEST:MOST", rich_help_panel=_ENGINE, help="A profile, such as 1:8:64; may be repeated."
    ),
    compute_capability: list[str] = typer.Option(
        [], metavar="X.Y", rich_help_panel=_ENGINE, help="GPU to build for, such as 8.9; may be repeated."
    ),
    optimization_level: int | None = typer.Option(
        None, min=0, max=5, metavar="N", rich_help_panel=_ENGINE, help="0 builds fastest, 5 searches longest."
    ),
    version_compatible: bool = typer.Option(
        False, rich_help_panel=_ENGINE, help="Let later versions of TensorRT load the engine too."
    ),
    hardware_compatible: str = typer.Option(
        "none",
        metavar="MODE",
        rich_help_panel=_ENGINE,
        help=f"Other GPUs that may load the engine: {listed(HARDWARE_COMPATIBILITIES)}.",
        callback=choice_from("--hardware-compatible", lambda: HARDWARE_COMPATIBILITIES),
        autocompletion=complete(lambda: HARDWARE_COMPATIBILITIES),
    ),
    workspace_mib: int | None = typer.Option(
        None, min=1, metavar="MIB", rich_help_panel=_ENGINE, help="Memory for kernels besides the weights, in MiB."
    ),
    require_fused: bool = typer.Option(
        False, rich_help_panel=_CHECKS, help="Fail unless every attention is a single kernel."
    ),
    require_precision: bool = typer.Option(
        False, rich_help_panel=_CHECKS, help="Fail unless every product runs in the precision's type."
    ),
    mask_cost: bool = typer.Option(
        False, rich_help_panel=_CHECKS, help="Build a twin whose masks are all ones as well, and compare."
    ),
    out: Path | None = typer.Option(
        None,
        "-o",
        "--output",
        metavar="ENGINE",
        rich_help_panel=OUTPUT,
        show_default="BUNDLE/engines/NAME",
        help="The engine to write.",
    ),
    log: Path | None = typer.Option(
        None, metavar="FILE", rich_help_panel=OUTPUT, help="Keep the whole log of the builder in this file."
    ),
    report: Path | None = typer.Option(
        None, metavar="FILE.html", rich_help_panel=OUTPUT, help="Write the card as a self-contained page."
    ),
    force: bool = typer.Option(
        False, "--force", rich_help_panel=OUTPUT, help="Replace the engine and the report if they exist."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """The card is read from the finished engine: which kernel computes each attention, and in which type."""
    require_output(out, force=force)
    require_output_file(report, force=force)
    if source.suffix == ".onnx" and out is None:
        raise InputError(
            "an ONNX file has no place for engines", hint=f"type gmmvit build {source} -o ENGINE to choose a folder"
        )
    with progress("build") as on_progress:
        from gmmvit_deploy.artifacts import open_bundle
        from gmmvit_deploy.engines.engine_from_onnx import engine_from_bundle, engine_from_onnx
        from gmmvit_deploy.engines.flavors import find_flavor
        from gmmvit_deploy.engines.options import BuildOptions, profile_from
        from gmmvit_deploy.engines.page import write_page
        from gmmvit_deploy.pages import require_page
        from gmmvit_deploy.variants import open_variant

        if report is not None:
            require_page(report, force=force, plots=False)

        options = BuildOptions(
            precision=precision_from(precision),
            profiles=tuple(profile_from(text) for text in batch),
            capabilities=tuple(compute_capability),
            optimization_level=optimization_level,
            timing_cache=timing_cache,
            version_compatible=version_compatible,
            hardware_compatible=hardware_compatible,  # type: ignore[arg-type]  # checked by its callback
            tf32=tf32,
            workspace_mib=workspace_mib,
            require_fused=require_fused,
            require_precision=require_precision,
        )
        library = find_flavor(flavor)
        if out is not None and source.suffix == ".onnx":
            engine = engine_from_onnx(
                source,
                options,
                library,
                out=out,
                mask_cost=mask_cost,
                log=log,
                force=force,
                on_progress=on_progress,
            )
        else:
            bundle = open_bundle(source)
            engine = engine_from_bundle(
                bundle,
                open_variant(bundle, options.precision),
                options,
                library,
                out=out,
                mask_cost=mask_cost,
                log=log,
                force=force,
                on_progress=on_progress,
            )
        if report is not None:
            write_page(engine, report, force=force)
    if as_json:
        print_json({"engine": str(engine.path), "card": engine.card.to_json()})
    else:
        print_card(engine)
        typer.echo(engine.path)
    if report is not None:
        note(f"report: {report}")


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
        ("attention", "on", "profile", "one kernel", "products", "kernel, or reason"),
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
