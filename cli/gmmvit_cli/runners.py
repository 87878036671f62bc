"""The options that choose runners, for the commands that compare or measure several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_cli.models import CLASS_RUNS, permit_class
from gmmvit_cli.options import CA, ENGINE_FOLDER, KEY_FILE, MODEL_NAME, URL_VARIABLE, access_from
from gmmvit_cli.output import note
from gmmvit_cli.panels import MODEL, Panel, completion, listed
from gmmvit_deploy.inference.precision import PRECISIONS, Precision
from gmmvit_deploy.precision_names import precision_from
from gmmvit_deploy.runtimes.runners.names import RUNNERS, runner_from

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.runtimes.runners.runner import Runner

_RUNNERS = Panel("Runners")


def _runners_from(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        runner_from(name)
    return names


def runner_option(default: str, purpose: str) -> Any:
    """Return the option ``--runner``.  default: in words."""
    return _RUNNERS.option(
        "LIST",
        f"{purpose}, separated by commas: {', '.join(RUNNERS)}. eager and compile run PyTorch; +kernels adds "
        "this project's CPU kernels (compiled code for attention). -gpu, onnxruntime-cuda and onnxruntime-tensorrt run "
        "on an NVIDIA GPU. A name with onnxruntime or openvino may end with a colon and a precision: openvino:bf16.",
        autocompletion=completion(RUNNERS, several=True),
        parser=_runners_from,
        show_default=default,
    )


def options_of_runners(
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
    precision: Precision = _RUNNERS.option(
        "NAME",
        f"Precision of onnxruntime and openvino if --runner names no precision: {listed(PRECISIONS)}.",
        autocompletion=completion(PRECISIONS),
        parser=precision_from,
        default="fp32",
    ),
    engine: Path | None = ENGINE_FOLDER,
    url: list[str] | None = _RUNNERS.option(
        "URL",
        "Address of the Triton server for triton-grpc (grpc://HOST:PORT) or triton-http (http://HOST:PORT); with "
        "TLS, grpcs:// or https://. May be repeated, once for each protocol.",
        show_default="the variable GMMVIT_URL, else grpc://localhost:8001, http://localhost:8000",
    ),
    served_name: str = MODEL_NAME,
    model: str | None = MODEL.option("FILE.py:CLASS", f"{CLASS_RUNS}this file to compute PyTorch's logits."),
) -> None:
    """Declare what `opened_runners` reads, besides ``--runner``."""


@contextmanager
def opened_runners(
    bundle: Bundle,
    given: Mapping[str, Any],
    *,
    first: Sequence[str] = (),
    timed: bool = False,
    takes_other_bundle: bool = False,
) -> Iterator[tuple[list[Runner], list[str]]]:
    """Open the runners of ``--runner``, or else ``first``, the default runners and the one that ``gmmvit optimize``
    chose on this kind of machine.  Yields (runners, why each other was left out).

    given: the parameters of the command, with all options of runners.
    timed: True to take what ``gmmvit export`` found the fastest, where ``gmmvit optimize`` did not run, and to print
    why a faster runner is not taken.  takes_other_bundle: as in `open_runners`.
    """
    permit_class(bundle, given["model"])
    names, precision = given["runner"], given["precision"]
    from gmmvit_deploy.runtimes.runners.chosen import choose_runner
    from gmmvit_deploy.runtimes.runners.open import default_runners, open_runners

    skipped: list[str] = []
    if names is None:
        defaults, skipped = default_runners(bundle, precision)
        chosen = choose_runner(bundle)
        for words in chosen.notes if timed else ():  # parity's check of the choice has them
            note(words)
        own = str(chosen.runner)
        taken = precision == "fp32" and (chosen.judged or (timed and chosen.measured))
        names = [*first, *defaults, *([own] if taken and own not in defaults else [])]
    with open_runners(
        names,
        bundle,
        urls=given["url"] or default_urls(names),
        model=given["served_name"],
        access=access_from(given["key_file"], given["ca"]),
        engine=given["engine"],
        precision=precision,
        takes_other_bundle=takes_other_bundle,
    ) as runners:
        yield runners, skipped


def default_urls(runners: Sequence[str]) -> list[str]:
    """Return the address of the variable GMMVIT_URL if a runner uses its protocol."""
    from gmmvit_deploy.runtimes.programs.access import protocol_of

    url = os.environ.get(URL_VARIABLE, "")
    return [url] if f"triton-{protocol_of(url)}" in runners else []
