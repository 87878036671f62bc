from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from gmmvit_cli.options import AS_JSON, FORCE, MODEL_NAME, of_fields
from gmmvit_cli.output import note, print_json, print_table
from gmmvit_cli.panels import INPUT, Panel, completion, listed, output_option
from gmmvit_cli.progress import progress
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, runner_from
from gmmvit_deploy.serving.names import TUNING_FILE

EXAMPLE = """gmmvit tune bundle --bound-ms 20
gmmvit tune bundle --bound-ms 20 --runner onnxruntime,openvino+kernels:bf16"""

_SEARCH = Panel("Search")


def _runners(text: str) -> tuple[RunnerName, ...]:
    """Read a text such as ``openvino:bf16,onnxruntime``.  Errors: InputError."""
    return tuple(runner_from(part, ON_CPUS) for part in text.split(","))


def tune(
    context: typer.Context,
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to serve."),
    bound_ms: float = _SEARCH.option(
        "MS", "Limit of the p99 latency (99% of requests are faster), measured by the client.", default=...
    ),
    runners: Sequence[RunnerName] | None = _SEARCH.option(
        "LIST",
        f"Runners to try, separated by commas: {listed(ON_CPUS)}. The suffix +kernels adds this project's CPU "
        "kernels. A name may end with a colon and a precision: openvino+kernels:bf16.",
        name="--runner",
        autocompletion=completion(ON_CPUS, several=True),
        parser=_runners,
        show_default="the choice of gmmvit optimize or gmmvit export for this machine",
    ),
    name: str = MODEL_NAME,
    out: Path = output_option("REPOSITORY", "Folder to write the repository to.", default=Path("model_repository")),
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """A bundle is the folder that gmmvit export writes. For each combination of settings, the command starts a
    Triton server and measures the highest request rate within the latency limit. The command writes the combination
    with the highest rate as a Triton model repository, which also contains all measurements.
    """
    with progress("tune") as on_progress:
        from gmmvit_deploy.bench.tune import TuneOptions, settings_table
        from gmmvit_deploy.bench.tune import tune as tuned
        from gmmvit_deploy.bundle.artifacts import open_bundle

        options = TuneOptions(**of_fields(TuneOptions, context.params))
        result = tuned(open_bundle(bundle), out, options, force=force, on_progress=on_progress)
    if as_json:
        print_json(result.to_json())
        return
    head = ("settings", "requests/s within the limit", "p99 at this rate", "images/s without the limit", "remark")
    print_table(head, settings_table(result.trials), title=f"p99 within {bound_ms:g} ms, over gRPC")
    for line in result.notes:
        note(line)
    note(f"measurements: {out / TUNING_FILE}")
    typer.echo(out)
