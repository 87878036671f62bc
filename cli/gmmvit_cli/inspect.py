from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.models import hints_from, options_of_checkpoints, permit_class
from gmmvit_cli.options import AS_JSON
from gmmvit_cli.output import note, print_json, print_table
from gmmvit_cli.panels import INPUT, OUTPUT
from gmmvit_cli.progress import progress
from gmmvit_deploy.checkpoints.reading import require_checkpoint
from gmmvit_deploy.errors import BundleError, InputError
from gmmvit_deploy.files.writing import require_free_file
from gmmvit_deploy.inference.precision import PRECISIONS
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.progress import Progress

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import VariantRecord
    from gmmvit_deploy.inference.runner_name import RunnerName
    from gmmvit_deploy.reports.pictures.attention_of_image import ImageAttention

SHARED = (options_of_checkpoints,)
EXAMPLE = """gmmvit inspect checkpoint.pth --report masks.html
gmmvit inspect bundle --image photo.jpg --report attention.html"""


def inspect(
    context: typer.Context,
    checkpoint: Path = INPUT.argument(
        "CHECKPOINT",
        "A PyTorch checkpoint, a safetensors file, a model folder of timm, or a bundle (the folder that gmmvit export "
        "writes).",
    ),
    image: Path | None = INPUT.option(
        "FILE",
        "Classify this image with the bundle's model, and draw the attention.",
        must_exist=True,
    ),
    report: Path | None = OUTPUT.option(
        "FILE",
        "Draw masks, steps and embeddings, with --image also labels and attention, to an HTML page (.html); or, "
        "without --image, only the masks to a picture (.png).",
    ),
    force: bool = OUTPUT.flag("--force/--no-force", "Replace the report if it exists."),
    as_json: bool = AS_JSON,
) -> None:
    """Lists the tensors that the model does not use, and values that point to a problem, such as underflow in a mask.
    With a bundle, lists its graphs, and for int8 the calibration images, what each recipe gave, and the projections
    that a gate moved to more exact forms.
    With a bundle and --image, classifies the image, and computes the mean attention distance of each head, and the
    attention rollout, which is the share of each patch in the tokens that the classifier reads.
    """
    if report is not None:
        require_free_file(report, force=force)
    hints = hints_from(context.params)
    is_bundle = (checkpoint / "manifest.json").is_file()
    if image is not None or is_bundle:
        if replace(hints, model=None) != LoadHints():
            raise InputError(
                f"{'--image draws the attention of a bundle, which' if image else 'a bundle'} records its model, and "
                "an option for checkpoints is given",
                hint="type gmmvit inspect BUNDLE --image FILE, without options that describe a checkpoint",
            )
        if image is not None:
            _inspect_attention(checkpoint, image, hints.model, report, force=force, as_json=as_json)
        else:
            _inspect_bundle(checkpoint, report, as_json=as_json)
        return
    require_checkpoint(checkpoint)
    with progress("inspect") as on_progress:
        from gmmvit_deploy.checkpoints.loading import describe_checkpoint, load_checkpoint

        on_progress(Progress("read the checkpoint"))
        loaded = load_checkpoint(checkpoint, hints)
        if report is None:
            described = describe_checkpoint(loaded)
        else:
            from gmmvit_deploy.reports.pictures.mask_report import write_report

            on_progress(Progress("draw the report"))
            described = write_report(loaded, report, force=force)
    if as_json:
        print_json(described)
        return
    _print(described)
    if report is not None:
        note(f"report: {report}")


def _print(described: dict[str, Any]) -> None:
    file = described["checkpoint"]
    # A field that is off or zero describes a variant that this model is not; --json prints every field.
    spec = {name: value for name, value in described["spec"].items() if name not in ("family", "mask") and value}
    rows = [
        ("file", f"{file['path']} ({file['wrapping']})"),
        ("SHA-256", file["sha256"]),
        ("model", described["model"]),
        *((name.replace("_", " "), str(value)) for name, value in spec.items()),
        ("trainable parameters", f"{described['trainable_parameters']:,}"),
        ("multiply-accumulates", f"{described['macs']:,} per image"),
        *((f"origin of {name.replace('_', ' ')}", where) for name, where in described["taken_from"].items()),
        *((f"unused key {key}", why) for key, why in described["unused_keys"].items()),
    ]
    print_table(("", ""), rows)
    if described["audit"]:
        findings = [(entry["severity"], entry["where"], entry["what"]) for entry in described["audit"]]
        print_table(("severity", "location", "observation"), findings)
    else:
        typer.echo("audit: no problem detected")


def _inspect_bundle(path: Path, report: Path | None, *, as_json: bool) -> None:
    if report is not None:
        raise InputError(
            "--report draws a checkpoint, or with --image the attention of a bundle", hint="add --image FILE"
        )
    from gmmvit_cli.convert import print_gate
    from gmmvit_deploy.bundle.artifacts import open_bundle
    from gmmvit_deploy.bundle.cascades import cascades_in
    from gmmvit_deploy.bundle.variants import forms_in, graph_file, record_of
    from gmmvit_deploy.reports.reporting import described_bundle

    bundle = open_bundle(path)
    graphs = {
        graph_file(precision, form): record
        for precision in PRECISIONS
        for form in forms_in(bundle, precision)
        if (record := record_of(bundle, precision, form)) is not None
    }
    cascades = dict(_cascade(bundle, first) for first in cascades_in(bundle))
    if as_json:
        records = {Path(file).stem: record.to_json() for file, record in graphs.items()}
        outputs = [asdict(output) for output in bundle.manifest.outputs]
        print_json({"bundle": described_bundle(bundle), "outputs": outputs, "records": records, "cascades": cascades})
        return
    rows = [("bundle", f"{path}, SHA-256 {bundle.sha256}")]
    rows += [("output", f"{o.name}: float32 (N, {o.shape[0]}){o.words}") for o in bundle.manifest.outputs]
    rows += [("graph model.onnx", "fp32")]
    for file, graph in graphs.items():
        rows += _rows_of(bundle, file, graph)
    rows += [(f"cascade {name}", words) for name, words in cascades.items()]
    print_table(("", ""), rows)
    for file, graph in graphs.items():
        _print_tried(file, graph.calibration or {})
        print_gate(file, graph)


def _cascade(bundle: Bundle, first: RunnerName) -> tuple[str, str]:
    """Return (the name of a cascade, what its record says or why it cannot be used)."""
    from gmmvit_deploy.bundle.cascades import read_cascade
    from gmmvit_deploy.runtimes.runners.open import graph_of

    try:
        words = str(read_cascade(bundle, first, graph_of(bundle, first).sha256))
    except BundleError as exc:
        words = str(exc)
    return str(replace(first, cascade=True)), words


def _rows_of(bundle: Bundle, file: str, graph: VariantRecord) -> list[tuple[str, str]]:
    from gmmvit_deploy.bundle.variants import open_variant
    from gmmvit_deploy.runtimes.runners.speed import speed_in_words

    tools = ", ".join(f"{name} {version}" for name, version in graph.versions.items())
    rows = [(f"graph {file}", f"{graph.precision}, SHA-256 {graph.onnx_sha256}, with {tools}")]
    try:
        open_variant(bundle, graph.precision, graph.form)
    except BundleError as exc:
        rows.append(("problem", str(exc)))
    calibration = graph.calibration or {}
    if calibration:
        images = f"{calibration['images']} of {calibration['source']}, SHA-256 {calibration['sha256']}"
        rows.append(("calibration images", images))
    if "machine" in calibration:
        rows.append(("converted on", calibration["machine"]))
    speeds = graph.speed.get("times_as_fast", {})
    return [*rows, *((f"speed in {runner}", speed_in_words(ratios)) for runner, ratios in speeds.items())]


def _print_tried(file: str, calibration: Mapping[str, Any]) -> None:
    tried = [
        (recipe, "chosen" if recipe == calibration["recipe"] else words)
        for key, words in (("tried", ""), ("screened", "on fewer images"))
        for recipe in sorted(calibration.get(key, ()), key=lambda recipe: -recipe["db"])
    ]
    if not tried:
        return
    cells = [
        (
            f"{recipe['db']:.1f}",
            recipe["rounding"],
            f"{recipe['smoothing']:g}",
            recipe["ranges"],
            *(str(len(recipe.get(form, ()))) for form in ("dynamic", "float32")),
            words,
        )
        for recipe, words in tried
    ]
    head = ("dB", "rounding of weights", "smoothing", "ranges", "dynamic", "in float32", "")
    print_table(head, cells, title=f"{file}: what was tried")


def _inspect_attention(
    path: Path, image: Path, model: str | None, report: Path | None, *, force: bool, as_json: bool
) -> None:
    from gmmvit_deploy.reports.pages import require_page, written_page

    if report is not None:
        require_page(report, force=force)
    with progress("inspect") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle

        on_progress(Progress("open the bundle"))
        bundle = open_bundle(path)
        permit_class(bundle, model)

        # Imports PyTorch: a bundle that is missing is refused without it.
        from gmmvit_deploy.reports.pictures.attention_of_image import attention_of_bundle
        from gmmvit_deploy.reports.pictures.attention_report import attention_page

        on_progress(Progress("compute the attention"))
        trained, pixels, attention = attention_of_bundle(bundle, image)
        if report is not None:
            on_progress(Progress("draw the report"))
            page = attention_page(trained, pixels, attention, bundle=path.name, image=image.name)
            written_page(page, report, force=force)
    described = {"bundle": str(path), "sha256": bundle.sha256, "image": str(image), **attention.to_json()}
    if as_json:
        print_json(described if report is None else {**described, "report": str(report)})
        return
    _print_attention(attention)
    if report is not None:
        note(f"report: {report}")


def _print_attention(attention: ImageAttention) -> None:
    for guess in attention.predictions:
        typer.echo(f"{guess.probability:7.2%}  {guess.label}{'' if guess.present else ' (absent)'}")
    rows = [
        (
            layer.layer,
            f"{layer.grid[0]}×{layer.grid[1]}",
            *("  ".join("–" if v is None else f"{v:.2f}" for v in values) for values in (layer.patches, layer.pixels)),
        )
        for layer in attention.distances
    ]
    if rows:
        columns = ("layer", "grid", "distance of each head, in steps of the grid", "in pixels")
        print_table(columns, rows, title="mean attention distance")
    for name, reason in attention.no_distances.items():
        typer.echo(f"no distance: {name}: {reason}")
    if attention.rollout is None:
        typer.echo(f"no rollout: {attention.no_rollout}")
        return
    shares = attention.rollout.values
    row, column = divmod(int(shares.argmax()), shares.shape[1])
    typer.echo(
        f"rollout: of {attention.rollout.reads}; largest share {shares.max():.2%}, of the patch in row {row + 1}, "
        f"column {column + 1}; prefix tokens {attention.rollout.prefix_share:.2%}"
    )
