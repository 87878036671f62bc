from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.convert import CALIBRATION, CALIBRATION_IMAGES, converted, note_disagreements, print_variants
from gmmvit_cli.options import (
    CHANNELS,
    FORCE,
    HEADS,
    IMAGE_SIZE,
    MASK_FORM,
    PRESET,
    hints_from,
    labels_from,
    normalisation_from,
)
from gmmvit_cli.output import JSON_OPTION, print_json, print_table, working
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.variants import Variant

_LARGEST = "_largest_abs"  # of each proven runner in a manifest's export_parity


def export(
    checkpoint: Path = typer.Argument(help="A .pth checkpoint or a safetensors file."),
    out: Path = typer.Option(..., "-o", "--output", help="The bundle to write."),
    input_kind: str = typer.Option(
        "pixels", "--input", help="pixels: uint8, normalised inside the graph. tensor: float32, normalised outside."
    ),
    max_batch: int = typer.Option(64, help="Largest batch."),
    heads: int | None = HEADS,
    preset: str | None = PRESET,
    mask_form: str = MASK_FORM,
    image_size: int | None = IMAGE_SIZE,
    channels: int | None = CHANNELS,
    dataset: str | None = typer.Option(
        None, help="Mean, std and labels of cifar10, cifar100, svhn, tiny-imagenet, mnist or digits."
    ),
    mean: str | None = typer.Option(None, help="Mean of each channel in [0, 1]: 0.49,0.48,0.45"),
    std: str | None = typer.Option(None, help="Standard deviation of each channel in [0, 1]."),
    resize: str = typer.Option(
        "stretch-bilinear", help="How training resized images: stretch-bilinear or stretch-bicubic, both antialiased."
    ),
    labels: str | None = typer.Option(None, help="A file with one label a line, or labels with commas between."),
    precision: str = typer.Option("fp32", help="fp32, and fp16, bf16, int8 or fp8 besides, with commas between."),
    calibration: str | None = CALIBRATION,
    calibration_images: int = CALIBRATION_IMAGES,
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """Load a checkpoint, fold its masks, export it to ONNX, and prove that it gives the same answers."""
    hints = hints_from(heads, preset, mask_form, image_size=image_size, channels=channels)
    if input_kind not in ("pixels", "tensor"):
        raise InputError(f"--input is {input_kind!r}; pixels or tensor was wanted")
    normalisation = normalisation_from(dataset, mean, std)
    variants: list[Variant] = []
    with working(f"exporting {checkpoint}") as says:
        from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
        from gmmvit_deploy.images import resize_rule_from

        options = ExportOptions(
            input_kind="pixels" if input_kind == "pixels" else "tensor",
            max_batch=max_batch,
            mean=normalisation.mean,
            std=normalisation.std,
            resize=resize_rule_from(resize),
            labels=labels_from(labels) or normalisation.labels,
        )

        def also(made: Bundle) -> None:
            variants.extend(converted(made, precision, calibration, calibration_images, says=says))

        bundle = bundle_from_checkpoint(checkpoint, out, options, hints=hints, also=also, force=force)
    manifest = bundle.manifest
    if as_json:
        records = {variant.precision: variant.record.to_json() for variant in variants if variant.record}
        print_json(
            {
                "bundle": str(out),
                "sha256": bundle.sha256,
                "manifest": manifest.to_json(),
                "precisions": records,
                "skipped": _not_proven(bundle),
            }
        )
        return
    shape = ", ".join(map(str, bundle.input_shape))
    rows = [
        ("model", f"{manifest.spec.family}, {manifest.spec.mask} mask"),
        ("input", f"{manifest.input_kind}: {bundle.input_dtype} (1..{manifest.max_batch}, {shape})"),
        ("output", f"logits: float32 (1..{manifest.max_batch}, {manifest.spec.classes})"),
        (
            "folded",
            f"{len(manifest.masks)} masks, one constant each ({', '.join(manifest.folding) or 'nothing to fold'})",
        ),
        *_proven(bundle),
        ("bundle", bundle.sha256),
    ]
    print_table(("", ""), rows)
    if any(variant.record for variant in variants):
        print_variants(variants)
    note_disagreements("model.onnx", manifest.role_disagreements)
    typer.echo(out)


def _proven(bundle: Bundle) -> list[tuple[str, str]]:
    parity = bundle.manifest.export_parity
    programs = {key.removesuffix(_LARGEST): found for key, found in parity.items() if key.endswith(_LARGEST)}
    rows = [
        ("proven", f"{name} differs from PyTorch by at most {found:.1e} (limit {parity['limit']:.1e})")
        for name, found in programs.items()
    ]
    return [*rows, *(("skipped", reason) for reason in _not_proven(bundle))]


def _not_proven(bundle: Bundle) -> list[str]:
    """Runners that could not be had when the bundle was made, each with the reason."""
    skipped = bundle.manifest.export_skipped
    return [reason if name in reason else f"{name}: {reason}" for name, reason in skipped.items()]
