from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.options import CPU_KERNELS, FORCE, cpu_kernels_from
from gmmvit_cli.output import JSON_OPTION, note, phases, print_json, print_table
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.precision import Precision


def tune(
    bundle: Path = typer.Argument(help="A bundle that gmmvit export wrote."),
    bound_ms: float = typer.Option(..., help="What p99 of the latency must stay below, as the client sees it."),
    out: Path = typer.Option(Path("model_repository"), "-o", "--output", help="The repository to write."),
    runtime: str | None = typer.Option(
        None,
        help="What may be used, with commas: onnxruntime, onnxruntime+kernels, openvino, openvino+kernels; a precision "
        "behind a colon, as in onnxruntime+kernels,openvino+kernels:bf16.  [default: onnxruntime, with our CPU kernels "
        "as --cpu-kernels says]",
    ),
    cpu_kernels: str | None = CPU_KERNELS,
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
            TuneOptions(
                runtimes=tuple(map(_runtime, runtime.split(","))) if runtime is not None else None,
                cpu_kernels=cpu_kernels_from(cpu_kernels),
                **options,
            ),
            force=force,
            told=told,
        )
    if as_json:
        print_json(found.to_json())
        return
    head = ("settings", "arrivals a second", "p99 there", "all at once", "")
    print_table(head, settings_table(found.trials), title=f"p99 below {bound_ms:g} ms, {protocol}")
    for reason in dict.fromkeys(trial.cpu_kernels.why_not for trial in found.trials if not trial.cpu_kernels.used):
        note(f"cpu kernels: off: {reason}")
    note(f"measured: {out / TUNING_FILE}")
    typer.echo(out)


def _runtime(text: str) -> tuple[str, Precision]:
    from gmmvit_deploy.precision import precision_behind

    name, precision = precision_behind(text)
    return name, precision or "fp32"
