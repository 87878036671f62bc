from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.options import FORCE
from gmmvit_cli.output import JSON_OPTION, note, phases, print_json, print_table
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.precision import Precision
    from gmmvit_deploy.serving.model_configs import Runtime


def tune(
    bundle: Path = typer.Argument(help="A bundle that gmmvit export wrote."),
    bound_ms: float = typer.Option(..., help="What p99 of the latency must stay below, as the client sees it."),
    out: Path = typer.Option(Path("model_repository"), "-o", "--output", help="The repository to write."),
    runtime: str = typer.Option(
        "onnxruntime",
        help="What may be used, with commas; a precision behind a colon, as in onnxruntime,openvino,openvino:bf16.",
    ),
    protocol: str = typer.Option("grpc", help="Of the clients: grpc or http."),
    name: str = typer.Option("gmmvit", help="Name of the model on the server."),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """Search the server's settings that take the most arrivals below a latency bound; write the best, measured."""
    with phases("tune") as told:
        from gmmvit_deploy.artifacts import open_bundle
        from gmmvit_deploy.bench.tune import TUNING_FILE, TuneOptions, settings_table
        from gmmvit_deploy.bench.tune import tune as tuned

        if protocol not in ("grpc", "http"):
            raise InputError(f"--protocol is {protocol!r}; grpc or http was wanted")
        options: dict[str, Any] = {"bound_ms": bound_ms, "protocol": protocol, "name": name}
        found = tuned(
            open_bundle(bundle),
            out,
            TuneOptions(runtimes=tuple(map(_runtime, runtime.split(","))), **options),
            force=force,
            told=told,
        )
    if as_json:
        print_json(found.to_json())
        return
    head = ("settings", "arrivals a second", "p99 there", "all at once", "")
    print_table(head, settings_table(found.trials), title=f"p99 below {bound_ms:g} ms, {protocol}")
    note(f"measured: {out / TUNING_FILE}")
    typer.echo(out)


def _runtime(text: str) -> tuple[Runtime, Precision]:
    from gmmvit_deploy.precision import precision_behind

    name, precision = precision_behind(text)
    if name not in ("onnxruntime", "openvino"):
        raise InputError(f"--runtime: {name!r} is not known", hint="known: onnxruntime, openvino")
    return name, precision or "fp32"  # type: ignore[return-value]  # checked above
