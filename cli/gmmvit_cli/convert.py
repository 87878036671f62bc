from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.models import CLASS_TO_CONVERT, permit_class
from gmmvit_cli.options import AS_JSON, CALIBRATION, CALIBRATION_IMAGES, require_calibration
from gmmvit_cli.output import note, print_json, print_table
from gmmvit_cli.panels import INPUT, OUTPUT, PRECISION, completion, listed, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.counts import counted
from gmmvit_deploy.inference.precision import PRECISIONS, Precision
from gmmvit_deploy.precision_names import precisions_from

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.variants import Variant, VariantRecord

COLLECTS = True
EXAMPLE = """gmmvit convert bundle --precision fp16
gmmvit convert bundle --precision int8 --calibration digits#train
gmmvit convert bundle --precision int8 --calibration digits --snr-db 25"""


def convert(
    context: typer.Context,
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to add graphs to."),
    precisions: Sequence[Precision] = PRECISION.option(
        "LIST",
        f"Precisions to write, separated by commas: {listed(PRECISIONS[1:])}. For int8 with calibration "
        "images, the command writes a graph for GPUs and a graph for CPUs; without, only the one for CPUs.",
        default=...,
        name="--precision",
        autocompletion=completion(PRECISIONS, several=True),
        parser=precisions_from,
    ),
    calibration: str | None = CALIBRATION,
    calibration_images: int = CALIBRATION_IMAGES,
    keep_decisions: float | None = PRECISION.option(
        "SHARE",
        "For int8: move projections (linear maps) to more exact forms, dynamic and then float32, until the graph for "
        "CPUs keeps the decision on this share of the calibration images that set no range, such as 0.98. The lower "
        "end of the share's interval must reach it. Only OpenVINO runs a graph with dynamic projections.",
    ),
    keep_neighbours: float | None = PRECISION.option(
        "SHARE",
        "As --keep-decisions, for a bundle without logits: the share of the ten nearest neighbours of each image, by "
        "the cosine of the features, such as 0.9.",
    ),
    snr_db: float | None = PRECISION.option(
        "DB", "As --keep-decisions, for the signal-to-noise ratio of the logits, in dB, such as 25."
    ),
    accuracy: float | None = PRECISION.option(
        "SHARE",
        "As --keep-decisions, for the ratio of int8's top-1 to that of fp32, such as 0.99. The calibration images "
        "need labels.",
    ),
    pad_heads: bool = PRECISION.flag(
        "--pad-heads/--no-pad-heads",
        "Pad the head dim (features of an attention head) with zeros where a TensorRT engine would otherwise copy "
        "tensors. Padding changes the logits only by rounding.",
        default=True,
    ),
    model: str | None = CLASS_TO_CONVERT,
    force: bool = OUTPUT.flag("--force", "Replace existing graphs of these precisions."),
    as_json: bool = AS_JSON,
) -> None:
    """A bundle is the folder that gmmvit export writes. Each graph is written into the bundle as graphs/PRECISION.onnx.
    Printed tables compare the logits and masks of each graph with those in fp32.
    """
    refusals = refusals_of(context)
    with refusals.collected():
        require_calibration(precisions, calibration)
    gate_options = {
        "--keep-decisions": keep_decisions,
        "--keep-neighbours": keep_neighbours,
        "--snr-db": snr_db,
        "--accuracy": accuracy,
    }
    gates = [option for option, value in gate_options.items() if value is not None]
    fits = calibration is not None and "int8" in (precisions or ("int8",))
    for option in gates:
        hint = f"type --precision int8 --calibration DATA, or leave {option} out"
        refusals.refuse(not fits, f"{option} is for int8 with calibration images", hint=hint)
    with refusals.collected():
        shares = {"keep_decisions": keep_decisions, "keep_neighbours": keep_neighbours, "accuracy": accuracy}
        gate = Gate(snr_db=snr_db, **shares) if gates else None
    with progress("convert") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.runtimes.programs.image_batches import require_images

        with refusals.collected():
            opened = open_bundle(bundle)
        refusals.raise_all()
        from gmmvit_deploy.exporting.variants import variants_from_bundle  # imports torch: after the bundle is known

        permit_class(opened, model)
        if calibration is not None:
            require_images(calibration, opened.manifest.image, opened.manifest.input_kind)
        variants = variants_from_bundle(
            opened,
            precisions,
            calibration,
            calibration_images,
            padded=pad_heads,
            gate=gate,
            force=force,
            on_progress=on_progress,
        )
    if as_json:
        print_json([variant.record.to_json() if variant.record else {"precision": "fp32"} for variant in variants])
        return
    print_variants(variants)
    for variant in variants:
        typer.echo(variant.path)


def _program_words(program: Mapping[str, Any]) -> str:
    if "skipped" in program:
        return f"skipped: {program['skipped']}"
    return f"{program['largest_abs']:.1e} (limit {program['limit']:.1e})"


def _calibration_words(record: VariantRecord) -> str:
    calibration = record.calibration
    if calibration is None:
        return "nothing; activations are quantised while running" if record.form == "dynamic" else ""
    images = f"{counted(calibration['images'], 'image')} of {calibration['source']}"
    if copies := calibration.get("copies"):
        images += f", without {copies} copies"
    if "recipe" not in calibration:
        return images
    recipe = calibration["recipe"]
    gave = (
        f"on {calibration['judged_images']} of them {recipe['db']:.1f} dB"
        if "db" in recipe
        else "for other classes, the best recipe"
    )
    return f"{images}; {gave} ({recipe['rounding']} rounding, smoothing {recipe['smoothing']:g}, {recipe['ranges']})"


def print_gate(name: str, record: VariantRecord) -> None:
    """Print what a gate moved to more exact forms and why, and what each number of such projections gives."""
    calibration = record.calibration or {}
    if "gate" not in calibration:
        return
    if moved := calibration.get("moved"):
        projections = [
            (move["projection"], move["form"], f"{move['error_share']:.1%}", f"{move['gain_ms']:.2f} ms")
            for move in moved
        ]
        print_table(("moved", "to", "share of int8's error", "time that int8 gained"), projections)
        if len(moved) == calibration["projections"]:
            note("no projection is left in the static form, so the graph for GPUs has no int8: use fp16 there")
    if not any(row["holds"] for row in calibration["curve"]):
        note(f"{name}: the gate does not hold; judge this graph with gmmvit parity --data before you use it")
    gate = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in calibration["gate"].items() if value)
    head = (
        "graph",
        "dynamic",
        "in float32",
        "neighbours kept" if "neighbours" in calibration["curve"][0] else "decisions kept",
        "dB",
        "top-1, in fp32",
        "time in openvino, batch 8, fp32 = 1",
        "gate",
    )
    rows = [(name, *_gate_row(row)) for row in calibration["curve"]]
    print_table(head, rows, title=f"{gate}, on {calibration['gate_images']} images that set no range")


def _gate_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    kept = ""
    for name in ("kept", "neighbours"):
        if name in row:
            low, high = row[f"{name}_interval"]
            kept = f"{row[name]:.2%} ({low:.2%} to {high:.2%})"
    return (
        str(row["dynamic"]),
        str(row["float32"]),
        kept,
        f"{row['db']:.1f}",
        f"{row['accuracy']:.2%}, {row['float32_accuracy']:.2%}" if "accuracy" in row else "",
        f"{row['time']:.2f}" if "time" in row else "",
        "holds" if row["holds"] else "does not hold",
    )


def print_variants(variants: list[Variant]) -> None:
    """Print how each precision changes the logits, and the mask of the head that changes most in each layer."""
    from gmmvit_deploy.runtimes.runners.speed import speed_in_words

    masks, programs, speeds = [], [], []
    rows: list[tuple[str, ...]] = []
    for variant in variants:
        record = variant.record
        if record is None:
            rows.append(("fp32", "unchanged: model.onnx", "", ""))
            continue
        name = f"{record.precision}, {record.form}, for CPUs" if record.form else record.precision
        errors = (f"{record.golden[distance]:.1e}" for distance in ("largest_abs", "largest_rel"))
        rows.append((name, *errors, _calibration_words(record)))
        programs += [(name, runner, _program_words(program)) for runner, program in record.programs.items()]
        times = record.speed.get("times_as_fast", {})
        speeds += [(name, runner, speed_in_words(ratios)) for runner, ratios in times.items()]
        for layer in dict.fromkeys(mask.layer for mask in record.masks if not record.form):  # there, masks are float32
            heads = [mask for mask in record.masks if mask.layer == layer]
            worst = max(heads, key=lambda mask: mask.largest_change)
            masks.append(
                (
                    name,
                    layer,
                    f"{worst.largest_change:.1e} (head {worst.head})",
                    f"{max(mask.relative_change for mask in heads):.1e}",
                    str(sum(mask.flushed for mask in heads)),
                    str(sum(mask.saturated for mask in heads)),
                )
            )
        print_gate(name, record)
    head = ("precision", "largest error of a logit", "relative to the largest logit", "calibrated on")
    print_table(head, rows)
    if programs:
        print_table(("precision", "runner", "largest error in the runner"), programs)
    if speeds:
        print_table(("precision", "runner", "speed"), speeds)
    if masks:
        mask_head = ("precision", "masks of", "largest change", "largest relative change", "rounded to 0", "saturated")
        print_table(mask_head, masks)
