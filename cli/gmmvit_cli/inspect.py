from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.attention import IMAGE, inspect_attention
from gmmvit_cli.choices import choice_from, complete, listed
from gmmvit_cli.models import (
    ARCHITECTURE,
    HEAD,
    IMAGE_SIZE,
    MODEL_ARGS,
    PRESET,
    RESIZE_TO,
    SET,
    hints_from,
)
from gmmvit_cli.options import INPUT, OUTPUT, require_output_file
from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table
from gmmvit_cli.progress import progress
from gmmvit_deploy.checkpoints.reading import require_checkpoint
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import ModelSpec
from gmmvit_deploy.progress import Progress

EXAMPLE = """gmmvit inspect checkpoint.pth --report masks.html
gmmvit inspect --preset swin --classes 10 --image-size 32 --mask gmm
gmmvit inspect bundle --image photo.jpg --report attention.html"""

_WITHOUT_FILE = "Without a checkpoint"
_GAUSSIANS = 5
"""The default number of Gaussians in a gmm mask of a preset."""
_MASKS = ModelSpec.mask_kinds  # a preset of RMT has the mask kind decay without an option


def inspect(
    checkpoint: Path | None = typer.Argument(
        None,
        metavar="CHECKPOINT",
        rich_help_panel=INPUT,
        help="A PyTorch checkpoint, a safetensors file, or a model folder of timm; with --image, a bundle (the folder "
        "that gmmvit export writes). Leave it out to describe a preset.",
    ),
    image: Path | None = IMAGE,
    preset: str | None = PRESET,
    image_size: int | None = IMAGE_SIZE,
    resize_to: int | None = RESIZE_TO,
    model: str | None = ARCHITECTURE,
    model_args: str | None = MODEL_ARGS,
    head: Path | None = HEAD,
    settings: list[str] = SET,
    classes: int | None = typer.Option(None, metavar="N", rich_help_panel=_WITHOUT_FILE, help="Number of classes."),
    mask: str = typer.Option(
        "plain",
        metavar="KIND",
        rich_help_panel=_WITHOUT_FILE,
        help=f"Mask on the attention scores: {listed(_MASKS)}. plain is no mask, gmm a Gaussian mixture mask, elm a "
        "learned matrix.",
        callback=choice_from("--mask", lambda: _MASKS),
        autocompletion=complete(lambda: _MASKS),
    ),
    kernels: int | None = typer.Option(
        None,
        metavar="K",
        rich_help_panel=_WITHOUT_FILE,
        show_default=str(_GAUSSIANS),
        help="Number of Gaussians in a gmm mask.",
    ),
    shared: bool = typer.Option(False, rich_help_panel=_WITHOUT_FILE, help="Use the same gmm mask in all heads."),
    spt: bool = typer.Option(
        False, "--spt", rich_help_panel=_WITHOUT_FILE, help="Embed the image and four shifted copies (SPT)."
    ),
    lsa: bool = typer.Option(
        False,
        "--lsa",
        rich_help_panel=_WITHOUT_FILE,
        help="Local attention (LSA): learned temperatures, and no token attends to itself.",
    ),
    report: Path | None = typer.Option(
        None,
        metavar="FILE",
        rich_help_panel=OUTPUT,
        help="Draw masks, steps and embeddings, or with --image the attention, to an HTML page (.html); or only the "
        "masks, or the attention, to a picture (.png).",
    ),
    force: bool = typer.Option(False, rich_help_panel=OUTPUT, help="Replace the report if it exists."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Lists the tensors that the model does not use, and values that point to a problem, such as underflow in a mask.
    Without a checkpoint, describes the model that --preset, --classes and --image-size define, with 3 channels unless
    --set channels is given.
    With a bundle and --image, computes the mean attention distance of each head, and the attention rollout, which is
    the share of each patch in the tokens that the classifier reads.
    """
    require_output_file(report, force=force)
    hints = hints_from(
        preset,
        settings,
        image_size=image_size,
        resize_to=resize_to,
        model=None if image is not None else model,
        model_args=model_args,
        head=head,
    )
    of_presets = _options_of_presets(classes, mask, kernels, shared, spt=spt, lsa=lsa)
    if image is not None:
        if hints != LoadHints() or of_presets:
            raise InputError(
                "--image draws the attention of a bundle, which records its model; an option for checkpoints is given",
                hint="type gmmvit inspect BUNDLE --image FILE, without options that describe a checkpoint",
            )
        inspect_attention(checkpoint, image, model, report, force=force, as_json=as_json)
        return
    if checkpoint is None:
        if hints.resize_to is not None or hints.interpolation is not None:
            raise InputError(
                "--resize-to and --set interpolation resize the model of a checkpoint, and no checkpoint is given",
                hint="type gmmvit inspect CHECKPOINT --resize-to PIXELS, or --image-size PIXELS for a preset",
            )
        _refuse_options_of_files(hints)
        described = _preset(preset, classes, image_size, hints.channels, mask, kernels, shared, spt=spt, lsa=lsa)
    else:
        if of_presets:
            typed = ", ".join(of_presets)
            raise InputError(
                f"{typed}: describes the model of a preset; {checkpoint} states this by its tensors",
                hint=f"leave {typed} out, or leave the checkpoint out and type --preset",
            )
        require_checkpoint(checkpoint)
        with progress("inspect") as on_progress:
            from gmmvit_deploy.checkpoints.loading import load_checkpoint
            from gmmvit_deploy.checkpoints.report import describe_checkpoint

            on_progress(Progress("read the checkpoint"))
            loaded = load_checkpoint(checkpoint, hints)
            described = describe_checkpoint(loaded)
            if report is not None:
                from gmmvit_deploy.reports.pictures.drawings import drawings_of
                from gmmvit_deploy.reports.pictures.mask_report import write_report

                on_progress(Progress("draw the report"))
                drawings = drawings_of(loaded.model)
                layers = write_report(loaded, report, force=force, described=described, drawings=drawings)
                described |= {"report": str(report), "masks": [layer.to_json() for layer in layers]}
                described |= drawings.to_json()
    if as_json:
        print_json(described)
        return
    _print(described)
    if report is not None and checkpoint is not None:
        note(f"report: {report}")


def _options_of_presets(
    classes: int | None, mask: str, kernels: int | None, shared: bool, *, spt: bool, lsa: bool
) -> tuple[str, ...]:
    """Return the names of the given options that only describe a model without a checkpoint."""
    given = {
        "--classes": classes is not None,
        "--mask": mask != "plain",
        "--kernels": kernels is not None,
        "--shared": shared,
        "--spt": spt,
        "--lsa": lsa,
    }
    return tuple(name for name, typed in given.items() if typed)


def _refuse_options_of_files(hints: LoadHints) -> None:
    """Errors: InputError for an option that states what a checkpoint does not show, because a preset states it."""
    for name, typed in (hints.typed() | hints.own()).items():
        if name not in ("image_size", "channels"):
            raise InputError(
                f"{typed} states what a checkpoint does not show, and no checkpoint is given",
                hint=f"type gmmvit inspect CHECKPOINT {typed}, or leave {typed.partition('=')[0]} out",
            )


def _preset(
    preset: str | None,
    classes: int | None,
    image_size: int | None,
    channels: int | None,
    mask: str,
    kernels: int | None,
    shared: bool,
    *,
    spt: bool,
    lsa: bool,
) -> dict[str, Any]:
    if preset is None or classes is None or image_size is None:
        raise InputError(
            "expected a checkpoint, or all of --preset, --classes and --image-size",
            hint="type gmmvit inspect CHECKPOINT, or gmmvit inspect --preset vit --classes 10 --image-size 32",
        )
    from gmmvit_deploy.checkpoints.report import describe_spec
    from gmmvit_deploy.models.families import preset_spec
    from gmmvit_deploy.models.specs import MaskSpec

    chosen = MaskSpec(
        kind=mask,  # type: ignore[arg-type]  # checked there, with the message that users read
        kernels=(_GAUSSIANS if kernels is None else kernels) if mask == "gmm" else 0,
        shared=shared,
    )
    spec = preset_spec(preset, classes=classes, image_size=image_size, mask=chosen, spt=spt, lsa=lsa)
    return describe_spec(spec if channels is None else replace(spec, channels=channels))


def _print(described: dict[str, Any]) -> None:
    file = described.get("checkpoint")
    spec = {
        name: value
        for name, value in described["spec"].items()
        if name not in ("family", "mask") and value is not None and value != ""
    }
    rows = [
        *([("file", f"{file['path']} ({file['wrapping']})"), ("SHA-256", file["sha256"])] if file else []),
        ("family", described["family"]),
        ("mask", described["mask_description"]),
        *((name.replace("_", " "), str(value)) for name, value in spec.items()),
        ("trainable parameters", f"{described['trainable_parameters']:,}"),
        ("multiply-accumulates", f"{described['macs']:,} per image"),
        *((f"origin of {name.replace('_', ' ')}", where) for name, where in described.get("taken_from", {}).items()),
        *((f"unused key {key}", why) for key, why in described.get("unused_keys", {}).items()),
    ]
    print_table(("", ""), rows)
    if described.get("audit"):
        findings = [(entry["severity"], entry["where"], entry["what"]) for entry in described["audit"]]
        print_table(("severity", "location", "observation"), findings)
    elif file:
        typer.echo("audit: no problem detected")
