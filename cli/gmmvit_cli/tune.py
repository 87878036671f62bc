from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.options import NAME, require_output
from gmmvit_cli.output import note, print_json, print_table
from gmmvit_cli.panels import FORCE, INPUT, JSON_OPTION, Panel, listed, output_option
from gmmvit_cli.progress import progress
from gmmvit_deploy.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.names import runner_from
from gmmvit_deploy.serving.names import RUNTIMES

EXAMPLE = """gmmvit tune bundle --bound-ms 20
gmmvit tune bundle --bound-ms 20 --runner onnxruntime,openvino+kernels:bf16"""

_SEARCH = Panel("Search")
_PROTOCOLS = ("grpc", "http")


def _runners(text: str) -> tuple[RunnerName, ...]:
    """Read a text such as ``openvino:bf16,onnxruntime``.  Errors: InputError."""
    return tuple(runner_from(part, RUNTIMES) for part in text.split(","))


def tune(
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to serve."),
    bound_ms: float = _SEARCH.option(
        "MS", "Limit of the p99 latency (99% of requests are faster), measured by the client.", default=...
    ),
    runner: str | None = _SEARCH.option(
        "LIST",
        f"Runners to try, separated by commas: {listed(RUNTIMES)}. The suffix +kernels adds this project's CPU "
        "kernels. A name may end with a colon and a precision: openvino+kernels:bf16.",
        names=RUNTIMES,
        several=True,
        read=_runners,
        show_default="the choice of gmmvit optimize or gmmvit export for this machine",
    ),
    protocol: str = _SEARCH.option(
        "NAME", f"Protocol of the measured requests: {listed(_PROTOCOLS)}.", default="grpc", names=_PROTOCOLS
    ),
    name: str = NAME,
    out: Path = output_option("REPOSITORY", "Folder to write the repository to.", default=Path("model_repository")),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """A bundle is the folder that gmmvit export writes. For each combination of settings, the command starts a
    Triton server and measures the highest request rate within the latency limit. The command writes the combination
    with the highest rate as a Triton model repository, which also contains all measurements.
    """
    require_output(out, force=force)
    with progress("tune") as on_progress:
        from gmmvit_deploy.bench.tune import TUNING_FILE, TuneOptions, settings_table
        from gmmvit_deploy.bench.tune import tune as tuned
        from gmmvit_deploy.bundle.artifacts import open_bundle

        settings: dict[str, Any] = {"bound_ms": bound_ms, "protocol": protocol, "name": name}
        options = TuneOptions(
            runners=_runners(runner) if runner is not None else None,
            **settings,
        )
        result = tuned(open_bundle(bundle), out, options, force=force, on_progress=on_progress)
    if as_json:
        print_json(result.to_json())
        return
    head = ("settings", "requests/s within the limit", "p99 at this rate", "images/s without the limit", "remark")
    print_table(head, settings_table(result.trials), title=f"p99 within {bound_ms:g} ms, {protocol}")
    for line in result.notes:
        note(line)
    note(f"measurements: {out / TUNING_FILE}")
    typer.echo(out)
