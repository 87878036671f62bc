from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.options import AS_JSON, options_of_target, target_from
from gmmvit_cli.output import print_json, print_table
from gmmvit_cli.panels import INPUT
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError

SHARED = (options_of_target,)
EXAMPLE = """gmmvit doctor
gmmvit doctor bundle --server-version 25.04"""


def doctor(
    context: typer.Context,
    bundle: Path | None = INPUT.argument(
        "BUNDLE",
        "Check the graphs and engines of this bundle, instead of the packages and runners of this machine.",
        default=None,
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Tries every package, runner, CPU kernel, engine builder and server. A runner is a program that computes logits,
    such as ONNX Runtime. A bundle is the folder that gmmvit export writes. If a bundle and a server option are given,
    the exit status is 1 unless the server can load an engine of the bundle.
    """
    with progress("doctor") as on_progress:
        from gmmvit_deploy.bundle.artifacts import open_bundle
        from gmmvit_deploy.doctor import examine, examine_bundle

        target = target_from(context.params)
        if bundle is None and target is not None:
            raise InputError(
                "expected a bundle, because the server options check which engines of a bundle the server can load",
                hint="type gmmvit doctor BUNDLE with --server-version, --server or --server-tensorrt",
            )
        if bundle is None:
            checks = examine(on_progress=on_progress)
        else:
            checks = examine_bundle(open_bundle(bundle), target, on_progress=on_progress)
    failed = target is not None and not any(check.kind == "server" and check.works for check in checks)
    if as_json:
        print_json([asdict(check) for check in checks])
        raise typer.Exit(int(failed))
    rows = [(c.kind, c.name, "yes" if c.works else "NO", c.detail) for c in checks]
    print_table(("kind", "name", "works", "detail"), rows)
    fixes = {check.fix: check.name for check in reversed(checks) if check.fix and not check.works}
    for fix, name in fixes.items():
        typer.echo(f"to fix {name}:  {fix}")
    raise typer.Exit(int(failed))
