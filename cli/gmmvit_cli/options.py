"""Options that several commands share, and the functions that read their text."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from gmmvit_cli.panels import GENERAL, INPUT, MODEL, OUTPUT, PRECISION, TARGET, Panel, completion, listed
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.data.files import KINDS, SPLITS
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS, runner_from
from gmmvit_deploy.serving.names import DEFAULT_REQUEST_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gmmvit_deploy.exporting.options import Thresholds
    from gmmvit_deploy.inference.precision import Precision
    from gmmvit_deploy.runtimes.engines.compatibility import ServerTensorRT
    from gmmvit_deploy.runtimes.programs.access import Access

URL_VARIABLE = "GMMVIT_URL"
"""The address of the server, for the commands that send requests to it."""
DEFAULT_NAME = "gmmvit"
"""The name of the model on a server."""
complete_data = completion([f"{kind}:" if kind != "digits" else kind for kind in KINDS])
_SPLITS = " or ".join(f"#{split}" for split in SPLITS)
_OF_GRAPHS = (*ON_CPUS, *ON_GPUS)


def checked_runner(names: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of ``NAME[:PRECISION]`` that refuses other names, before any work."""

    def parse(text: str) -> str:
        runner_from(text, names)
        return text

    return parse


def _page_with_plots(text: str) -> Path:
    require("matplotlib", package="matplotlib", extra="report")
    return Path(text)


AS_JSON = GENERAL.flag("--json", "Print JSON on stdout.")
FORCE = OUTPUT.flag("--force", "Replace the output if it exists.")
FORCE_REPORT = OUTPUT.flag("--force", "Replace the report if it exists.")
REPORT = OUTPUT.option("FILE.html", "Write a self-contained HTML page with plots.", parser=_page_with_plots)
DATA = INPUT.option(
    "KIND:PATH",
    f"Images: KIND:PATH, or only the word {KINDS[-1]} for scikit-learn's handwritten digits. KIND is "
    f"{listed(KINDS[:-1])}; array is an .npz or .npy file; table is a .csv file with labels of 0 and 1. Append "
    f"{_SPLITS} to choose the split (default: {SPLITS[0]}).",
    autocompletion=complete_data,
)
CALIBRATION = PRECISION.option(
    "DATA",
    "Calibration images, required for fp8; without images, int8 is for OpenVINO on CPUs only. A folder, an .npz "
    f"file, or KIND:PATH as in gmmvit parity --data, such as cifar10:PATH. Append {_SPLITS} to choose the split "
    f"(default: {SPLITS[1]}).",
    autocompletion=complete_data,
)
CALIBRATION_IMAGES = PRECISION.option("N", "Maximum number of calibration images.", min=1, default=512)
MODEL_NAME = TARGET.option("NAME", "Name of the model on the server.", default=DEFAULT_NAME)
REQUEST_PIXELS = TARGET.option(
    "N",
    "Maximum number of pixels in the images of a request. The server counts the pixels from the images' headers, "
    "and refuses a request with more pixels.",
    show_default=f"{DEFAULT_REQUEST_PIXELS}",
)
RUNNER_OF_GRAPHS = MODEL.option(
    "NAME[:PRECISION]",
    "Runner of the network, and its precision (default: fp32), such as openvino+kernels:bf16; int8 may state its "
    "form, as in openvino:int8-static, and +fp32 computes nearly undecided images again in float32. "
    f"NAME is {listed(_OF_GRAPHS)}. +kernels adds this project's CPU kernels "
    "(compiled code for attention).",
    autocompletion=completion(_OF_GRAPHS),
    parser=checked_runner(_OF_GRAPHS),
    show_default="the choice of gmmvit optimize or gmmvit export for this machine",
)
TRITONSERVER = TARGET.option(
    "PROGRAM",
    "Path of the tritonserver program to run.",
    must_exist=True,
    show_default="from PATH, else from the nvidia-pytriton wheel",
)
ENGINE_FOLDER = INPUT.option(
    "ENGINE", "Engine folder that gmmvit build wrote. Required to run TensorRT.", must_exist=True
)
KEY_FILE = TARGET.option(
    "FILE",
    "File with the key for the server's gateway, alone on a line.",
    must_exist=True,
    envvar="GMMVIT_KEY_FILE",
    show_envvar=False,
    show_default="the variable GMMVIT_KEY_FILE",
)
CA = TARGET.option(
    "FILE",
    "PEM file of the certificate authority to trust for grpcs:// and https://.",
    must_exist=True,
    envvar="GMMVIT_CA",
    show_envvar=False,
    show_default="the variable GMMVIT_CA, else the public authorities",
)


def options_of_target(
    server_version: str | None = TARGET.option(
        "RELEASE", "Release of NVIDIA's Triton container that will load the engine, such as 25.04."
    ),
    server: str | None = TARGET.option(
        "URL",
        "Running Triton server that will load the engine: grpc://HOST:PORT or http://HOST:PORT; with TLS, grpcs:// or "
        "https://.",
    ),
    server_tensorrt: str | None = TARGET.option(
        "VERSION",
        "TensorRT version of the server, such as 10.9.0. Required if gmmvit does not know the server's release.",
    ),
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
) -> None:
    """Declare what `target_from` reads."""


class Normalisation(NamedTuple):
    """mean, std: a number for each channel, or None.  labels: of the data set; None without a data set."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None


def normalisation_from(name: str | None, mean: str | None, std: str | None) -> Normalisation:
    """Read ``--dataset``, or ``--mean --std``, or neither.  The number of channels is checked against the network."""
    if name is not None:
        if mean is not None or std is not None:
            raise InputError(
                "--dataset excludes --mean and --std, because the data set determines both",
                hint=f"type --dataset {name} without --mean and --std, or --mean and --std without --dataset",
            )
        data = DATASETS[name]
        return Normalisation(data.mean, data.std, data.labels)
    if (mean is None) != (std is None):
        raise InputError(
            "--mean requires --std, and --std requires --mean",
            hint="type both, such as --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5",
        )
    if mean is None or std is None:
        return Normalisation()
    return Normalisation(_numbers("--mean", mean), _numbers("--std", std))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError as exc:
        raise InputError(
            f"{option}: expected a number for each channel, such as 0.49,0.48,0.45 for R, G and B, got {text!r}"
        ) from exc


def labels_from(text: str) -> tuple[str, ...]:
    """Read labels from a file, or from text: one label, or commas between them.  Errors: InputError."""
    from gmmvit_deploy.images.names import names_from_text, text_from_bytes

    path = Path(text)
    # os.path.exists is False for a text that is too long for a path.
    if not os.path.exists(text) and ("," in text or not (path.suffix or "/" in text)):  # noqa: PTH110
        return names_from_text(text, "--labels", separator=",")
    source = f"--labels {text}"
    try:
        return names_from_text(text_from_bytes(path.read_bytes(), source), source)
    except OSError as exc:
        raise InputError(
            f"{source}: expected a file with a label on each line: {exc.strerror}",
            hint="type --labels FILE, or the labels themselves: --labels cat,dog",
        ) from exc


def thresholds_from(text: str) -> Thresholds:
    """Read thresholds: a number, a file with one on each line, or a .json list or label → number.  Errors:
    InputError.
    """
    from gmmvit_deploy.images.names import text_from_bytes

    path = Path(text)
    try:
        return float(text)
    except ValueError:
        pass
    try:
        content = text_from_bytes(path.read_bytes(), f"--thresholds {text}")
        values = json.loads(content) if path.suffix == ".json" else content.split()
        if isinstance(values, dict):
            return {label: float(value) for label, value in values.items()}
        if not isinstance(values, list):
            raise ValueError(f"got {type(values).__name__}")
        return tuple(float(value) for value in values)
    except (OSError, ValueError, TypeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InputError(
            f"--thresholds {text}: expected a number on each line, or JSON with a list of numbers or label: number: "
            f"{reason}",
            hint="type --thresholds FILE, or a number for all labels, such as --thresholds 0.5",
        ) from exc


def require_calibration(precisions: Sequence[Precision] | None, calibration: str | None) -> None:
    """Refuse ``--calibration`` that cannot work, before anything is read.  Errors: InputError.

    precisions: None if they were refused themselves.
    """
    from gmmvit_deploy.inference.precision import CALIBRATED, SPECS
    from gmmvit_deploy.runtimes.programs.image_batches import require_source

    if calibration is None:
        for precision in precisions or ():
            if SPECS[precision].calibrated and "dynamic" not in SPECS[precision].forms:
                raise InputError(
                    f"{precision} needs calibration images",
                    hint="add --calibration FOLDER, --calibration FILE.npz or --calibration KIND:PATH, with images "
                    "like those that the model will classify",
                )
    elif precisions and not {*CALIBRATED}.intersection(precisions):
        raise InputError(
            f"--calibration is for {' and '.join(CALIBRATED)}; {', '.join(precisions)} needs no calibration",
            hint=f"leave --calibration out, or type --precision {CALIBRATED[0]}",
        )
    else:
        require_source(calibration)


def access_from(key_file: Path | None, ca: Path | None) -> Access:
    """Read the files of ``--key-file`` and ``--ca``.  Errors: InputError when a file has another content."""
    from gmmvit_deploy.runtimes.programs.access import open_access

    # gRPC would print a line of its own beside the error, for a certificate that is not trusted. Read at its import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return open_access(key_file=key_file, ca=ca)


def target_from(given: Mapping[str, Any]) -> ServerTensorRT | None:
    """Return the server whose TensorRT must load an engine; None if no option names a server."""
    from gmmvit_deploy.runtimes.engines.compatibility import server_tensorrt
    from gmmvit_deploy.runtimes.programs.triton import TritonConnection

    release, url, tensorrt = given["server_version"], given["server"], given["server_tensorrt"]
    access = access_from(given["key_file"], given["ca"])
    if release is not None and url is not None:
        raise InputError(
            "--server-version and --server exclude each other",
            hint=f"type --server {url} or --server-version {release}, not both",
        )
    if url is not None:
        with TritonConnection(url, access=access) as connection:
            return server_tensorrt(triton=connection.version(), tensorrt=tensorrt, name=url)
    if release is None and tensorrt is None:
        return None
    return server_tensorrt(release=release, tensorrt=tensorrt)


def of_fields(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a command that have the names of a dataclass's fields."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def typed(context: typer.Context, panel: Panel, *names: str) -> list[str]:
    """Return the options that the user typed, such as ``--keys``, of those below a heading or with these names."""
    options = []
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        below = getattr(param, "rich_help_panel", None) == panel.title
        if (below or param.name in names) and source is not None and source.name == "COMMANDLINE":
            options.append(param.opts[0])
    return options
