from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table, working

if TYPE_CHECKING:
    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.variants import Variant

CALIBRATION = typer.Option(
    None,
    "--calibration",
    help="Real images for int8 and fp8: a folder, an .npz, or cifar10:PATH#train, digits#train and the like.",
)
CALIBRATION_IMAGES = typer.Option(512, "--calibration-images", min=1, help="How many of them are used, at most.")


def convert(
    bundle: Path = typer.Argument(help="A bundle that gmmvit export wrote."),
    precision: str = typer.Option(..., help="fp16, bf16, int8 or fp8, or several with commas between."),
    calibration: str | None = CALIBRATION,
    calibration_images: int = CALIBRATION_IMAGES,
    pad_heads: bool = typer.Option(True, help="Pad head dims with zeros where engines would need copies. Exact."),
    force: bool = typer.Option(False, "--force", help="Replace the graphs of these precisions if they exist."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Write the network in other precisions beside model.onnx, and say what each does to masks and answers."""
    with working("opening the bundle") as says:
        from gmmvit_deploy.artifacts import open_bundle

        opened = open_bundle(bundle)
        variants = converted(
            opened, precision, calibration, calibration_images, says=says, pad_heads=pad_heads, force=force
        )
    if as_json:
        print_json([variant.record.to_json() if variant.record else {"precision": "fp32"} for variant in variants])
        return
    print_variants(variants)
    for variant in variants:
        typer.echo(variant.path)


def converted(
    bundle: Bundle,
    precision: str,
    calibration: str | None,
    images: int,
    *,
    says: object = None,
    pad_heads: bool = True,
    force: bool = False,
) -> list[Variant]:
    """The bundle's graphs in the precisions that ``--precision`` names."""
    from gmmvit_deploy.errors import InputError
    from gmmvit_deploy.export.variants import variant_from_bundle
    from gmmvit_deploy.graphs.quantize import QUANTIZED
    from gmmvit_deploy.precision import precisions_from
    from gmmvit_deploy.runtime.image_batches import open_images

    named = precisions_from(precision)
    if calibration is not None and not set(named) & set(QUANTIZED):
        raise InputError(f"--calibration is for {' and '.join(QUANTIZED)}; {', '.join(named)} needs none")
    variants = []
    for one in named:
        if callable(says):
            says(f"writing {one}")
        data = open_images(bundle, calibration, limit=images) if calibration and one in QUANTIZED else None
        variants.append(variant_from_bundle(bundle, one, calibration=data, padded=pad_heads, force=force))
    return variants


def _program_words(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    return f"{found['largest_abs']:.1e} (limit {found['limit']:.1e})"


def note_disagreements(graph: str, disagreements: Sequence[str]) -> None:
    """Report nodes whose declared role is doubtful: a wrong role computes in a wrong type."""
    for line in disagreements:
        note(f"{graph}: check this role: {line}")


def print_variants(variants: list[Variant]) -> None:
    """What each precision does to the answers, and to the mask of each layer's worst head."""
    rows, masks, programs = [], [], []
    for variant in variants:
        record = variant.record
        if record is None:
            rows.append(("fp32", "model.onnx itself", "", "", ""))
            continue
        calibration = f"{record.calibration['images']} images" if record.calibration else ""
        rows.append(
            (
                record.precision,
                f"{record.golden['largest_abs']:.1e}",
                f"{record.golden['largest_rel']:.1e}",
                f"{record.golden['argmax_agreement']:.0%}",
                calibration,
            )
        )
        programs += [(record.precision, name, _program_words(found)) for name, found in record.programs.items()]
        for layer in dict.fromkeys(mask.layer for mask in record.masks):
            heads = [mask for mask in record.masks if mask.layer == layer]
            worst = max(heads, key=lambda mask: mask.largest_change)
            masks.append(
                (
                    record.precision,
                    layer,
                    f"{worst.largest_change:.1e} (head {worst.head})",
                    f"{max(mask.relative_change for mask in heads):.1e}",
                    str(sum(mask.flushed for mask in heads)),
                    str(sum(mask.saturated for mask in heads)),
                )
            )
        note_disagreements(variant.path.name, record.role_disagreements)
    print_table(("precision", "logits differ by", "of the largest", "same class", "calibrated on"), rows)
    if programs:
        print_table(("precision", "the file in", "logits differ by"), programs)
    if masks:
        print_table(("precision", "mask of", "largest change", "relative", "flushed to 0", "saturated"), masks)
