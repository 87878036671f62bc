from __future__ import annotations

from pathlib import Path

import typer

from gmmvit_cli.options import HEADS, MASK_FORM, PRESET, hints_from
from gmmvit_cli.output import JSON_OPTION, print_json, print_table, working


def inspect(
    checkpoint: Path = typer.Argument(help="A .pth checkpoint or a safetensors file."),
    heads: int | None = HEADS,
    preset: str | None = PRESET,
    mask_form: str = MASK_FORM,
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what a checkpoint is: family, sizes, parameters, every key accounted for, and what is odd about it."""
    hints = hints_from(heads, preset, mask_form)
    with working(f"reading {checkpoint}"):
        from gmmvit_deploy.checkpoints.report import report_on

        report = report_on(checkpoint, hints)
    if as_json:
        print_json(report)
        return
    spec = {name: value for name, value in report["spec"].items() if name not in ("family", "mask")}
    rows = [
        ("file", f"{checkpoint} ({report['checkpoint']['wrapping']})"),
        ("SHA-256", report["checkpoint"]["sha256"]),
        ("family", report["family"]),
        ("mask", report["mask_description"]),
        *((name.replace("_", " "), str(value)) for name, value in spec.items()),
        ("trainable parameters", f"{report['trainable_parameters']:,}"),
        *((f"unused key {key}", why) for key, why in report["unused_keys"].items()),
    ]
    print_table(("", ""), rows)
    if report["audit"]:
        print_table(("audit", "where", "what"), [(f["severity"], f["where"], f["what"]) for f in report["audit"]])
    else:
        typer.echo("audit: nothing odd")
