"""The options that choose runners, for the commands that compare or measure several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from gmmvit_cli.choices import complete, complete_list, listed, read_by
from gmmvit_deploy.precision import PRECISIONS, Precision, precision_behind, precision_from
from gmmvit_deploy.runtimes.runners.names import RUNNERS, require_runner

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle

__all__ = ["RUNNERS_PANEL", "URLS", "runner_names", "runner_option", "runner_precision_option"]

RUNNERS_PANEL = "Runners"

URLS = typer.Option(
    [],
    metavar="URL",
    rich_help_panel=RUNNERS_PANEL,
    show_default="the variable GMMVIT_URL, else grpc://localhost:8001, http://localhost:8000",
    help="Address of the Triton server for triton-grpc (grpc://HOST:PORT) or triton-http (http://HOST:PORT); with "
    "TLS, grpcs:// or https://. May be repeated, once for each protocol.",
)


def _require_runners(text: str) -> None:
    for part in text.split(","):
        require_runner(precision_behind(part)[0])


def runner_option(default: str | None, shown: str | None, purpose: str) -> Any:
    """Return the option ``--runner``.  shown: the default as text in the help; None shows ``default`` itself."""
    return typer.Option(
        default,
        "--runner",
        metavar="LIST",
        rich_help_panel=RUNNERS_PANEL,
        show_default=shown if shown is not None else True,
        help=f"{purpose}, separated by commas: {', '.join(RUNNERS)}. eager and compile run PyTorch; +kernels adds "
        "this project's CPU kernels (compiled code for attention). -gpu, onnxruntime-cuda and onnxruntime-tensorrt run "
        "on an NVIDIA GPU. A name with onnxruntime or openvino may end with a colon and a precision: openvino:bf16.",
        callback=read_by(_require_runners),
        autocompletion=complete_list(lambda: RUNNERS),
    )


def runner_names(
    typed: str | None, bundle: Bundle, precision: Precision, *, first: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return (the names of ``--runner``, or else ``first`` and `default_runners`; a reason for each left-out runner).

    Errors: those of `default_runners`.
    """
    from gmmvit_deploy.runtimes.runners.open import default_runners

    if typed is not None:
        return [name.strip() for name in typed.split(",")], []
    names, skipped = default_runners(bundle, precision)
    return [*first, *names], skipped


def runner_precision_option() -> Any:
    return typer.Option(
        "fp32",
        "--precision",
        metavar="NAME",
        rich_help_panel=RUNNERS_PANEL,
        help=f"Precision of onnxruntime and openvino if --runner names no precision: {listed(PRECISIONS)}.",
        callback=read_by(precision_from),
        autocompletion=complete(lambda: PRECISIONS),
    )
