from __future__ import annotations

from dataclasses import asdict

import typer

from gmmvit_cli.output import JSON_OPTION, print_json, print_table, working


def doctor(as_json: bool = JSON_OPTION) -> None:
    """Say what is installed, which runners, engines and servers work here, and how to add the rest."""
    with working("trying everything"):
        from gmmvit_deploy.doctor import examine

        checks = examine()
    if as_json:
        print_json([asdict(check) for check in checks])
        return
    rows = [(c.kind, c.name, "works" if c.works else "no", c.detail) for c in checks]
    print_table(("kind", "what", "", "detail"), rows)
    fixes = {check.fix: check.name for check in reversed(checks) if check.fix and not check.works}
    for fix, name in fixes.items():
        typer.echo(f"for {name}:  {fix}")
