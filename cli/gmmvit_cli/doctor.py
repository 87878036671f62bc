from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.options import INPUT, SERVER, SERVER_TENSORRT, SERVER_VERSION, server_from
from gmmvit_cli.output import JSON_OPTION, note, print_json, print_table
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError, OutputError
from gmmvit_deploy.progress import Progress

EXAMPLE = """gmmvit doctor
gmmvit doctor bundle --server-version 25.04"""


def doctor(
    bundle: Path | None = typer.Argument(
        None, metavar="BUNDLE", rich_help_panel=INPUT, help="A bundle, to check its graphs and engines instead."
    ),
    server_version: str | None = SERVER_VERSION,
    server: str | None = SERVER,
    server_tensorrt: str | None = SERVER_TENSORRT,
    empty_kernel_cache: bool = typer.Option(
        False,
        rich_help_panel="Kernels",
        help="First remove compiled CPU kernels and recorded failures, so that they are compiled again.",
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """With a bundle, shows whether a server will load its engines; with a server as well, the exit status is 1 unless
    it will load at least one engine.
    """
    with progress("doctor") as on_progress:
        from gmmvit_deploy.artifacts import open_bundle
        from gmmvit_deploy.doctor import examine, examine_bundle

        if empty_kernel_cache:
            _empty_kernel_cache()
        there = server_from(server_version, server, server_tensorrt)
        if bundle is None and there is not None:
            raise InputError(
                "--server and --server-version need a bundle", hint="type gmmvit doctor BUNDLE --server URL"
            )
        on_progress(Progress("try every runner" if bundle is None else "check the graphs and engines"))
        checks = examine() if bundle is None else examine_bundle(open_bundle(bundle), there)
    failed = there is not None and not any(check.kind == "server" and check.works for check in checks)
    if as_json:
        print_json([asdict(check) for check in checks])
        raise typer.Exit(int(failed))
    rows = [(c.kind, c.name, "works" if c.works else "no", c.detail) for c in checks]
    print_table(("kind", "what", "", "detail"), rows)
    fixes = {check.fix: check.name for check in reversed(checks) if check.fix and not check.works}
    for fix, name in fixes.items():
        typer.echo(f"for {name}:  {fix}")
    raise typer.Exit(int(failed))


def _empty_kernel_cache() -> None:
    from gmmvit_deploy.kernels import libraries

    try:
        removed, left = libraries.empty_kernel_cache()
    except (OSError, RuntimeError) as exc:
        raise OutputError(
            f"the kernel cache cannot be emptied: {exc}", hint="type XDG_CACHE_HOME=FOLDER gmmvit doctor"
        ) from exc
    in_use = f"; {len(left)} left, in use by a living process" if left else ""
    note(f"removed {len(removed)} files from the kernel cache{in_use}")
