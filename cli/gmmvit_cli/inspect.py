from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.options import CHANNELS, HEADS, MASK_FORM, PRESET, hints_from
from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table, working
from gmmvit_deploy.errors import InputError


def inspect(
    checkpoint: Path | None = typer.Argument(None, help="A .pth checkpoint or a safetensors file."),
    heads: int | None = HEADS,
    preset: str | None = PRESET,
    mask_form: str = MASK_FORM,
    report: Path | None = typer.Option(None, help="Write the masks as a page (.html) or a picture (.png)."),
    force: bool = typer.Option(False, help="Replace the report if it exists."),
    classes: int | None = typer.Option(None, help="Without a file: classes of the preset."),
    image_size: int | None = typer.Option(
        None, help="Side of the images in pixels: without a file, or where no tensor of the file tells it."
    ),
    channels: int | None = CHANNELS,
    mask: str = typer.Option("plain", help="Without a file: plain, elm or gmm."),
    kernels: int = typer.Option(5, help="Without a file: Gaussians of a gmm mask."),
    shared: bool = typer.Option(False, help="Without a file: one gmm mask for all heads."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what a checkpoint is: family, sizes, parameters, MACs, every key, what is odd; or what a preset would be."""
    if checkpoint is None:
        described = _preset(preset, classes, image_size, channels, mask, kernels, shared)
    else:
        hints = hints_from(heads, preset, mask_form, image_size=image_size, channels=channels)
        with working(f"reading {checkpoint}"):
            from gmmvit_deploy.checkpoints.loading import load_checkpoint
            from gmmvit_deploy.checkpoints.report import describe_checkpoint

            loaded = load_checkpoint(checkpoint, hints)
            described = describe_checkpoint(loaded)
            if report is not None:
                from gmmvit_deploy.pictures.mask_report import write_report

                layers = write_report(loaded, report, force=force)
                described |= {"report": str(report), "masks": [layer.to_json() for layer in layers]}
    if as_json:
        print_json(described)
        return
    _print(described)
    if report is not None and checkpoint is not None:
        note(f"report: {report}")


def _preset(
    preset: str | None,
    classes: int | None,
    image_size: int | None,
    channels: int | None,
    mask: str,
    kernels: int,
    shared: bool,
) -> dict[str, Any]:
    if preset is None or classes is None or image_size is None:
        raise InputError(
            "nothing to inspect",
            hint="name a checkpoint, or all of --preset NAME --classes N --image-size S",
        )
    from gmmvit_deploy.checkpoints.report import describe_spec
    from gmmvit_deploy.families import preset_spec
    from gmmvit_deploy.specs import MaskSpec

    chosen = MaskSpec(
        kind=mask,  # type: ignore[arg-type]  # checked there, with the error that users see
        kernels=kernels if mask == "gmm" else 0,
        shared=shared,
    )
    spec = preset_spec(preset, classes=classes, image_size=image_size, mask=chosen)
    return describe_spec(spec if channels is None else replace(spec, channels=channels))


def _print(described: dict[str, Any]) -> None:
    file = described.get("checkpoint")
    spec = {name: value for name, value in described["spec"].items() if name not in ("family", "mask")}
    rows = [
        *([("file", f"{file['path']} ({file['wrapping']})"), ("SHA-256", file["sha256"])] if file else []),
        ("family", described["family"]),
        ("mask", described["mask_description"]),
        *((name.replace("_", " "), str(value)) for name, value in spec.items()),
        ("trainable parameters", f"{described['trainable_parameters']:,}"),
        ("multiply-accumulates", f"{described['macs']:,} an image"),
        *((f"unused key {key}", why) for key, why in described.get("unused_keys", {}).items()),
    ]
    print_table(("", ""), rows)
    if described.get("audit"):
        findings = [(f["severity"], f["where"], f["what"]) for f in described["audit"]]
        print_table(("audit", "where", "what"), findings)
    elif file:
        typer.echo("audit: nothing odd")
