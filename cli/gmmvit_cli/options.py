"""Options that several commands share, and the functions that read their text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gmmvit_cli.panels import INPUT, MODEL, PRECISION, TARGET, completion, listed
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import KINDS, SPLITS
from gmmvit_deploy.images.datasets import DATASETS, dataset
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS, runner_from
from gmmvit_deploy.serving.names import DEFAULT_REQUEST_PIXELS

if TYPE_CHECKING:
    from gmmvit_deploy.export.options import Thresholds
    from gmmvit_deploy.precision import Precision
    from gmmvit_deploy.runtimes.engines.compatibility import ServerTensorRT
    from gmmvit_deploy.runtimes.programs.access import Access

complete_data = completion([f"{kind}:" if kind != "digits" else kind for kind in KINDS])

DATASET = INPUT.option(
    "NAME",
    f"Use the mean, standard deviation and labels of a data set: {listed(tuple(DATASETS))}.",
    names=tuple(DATASETS),
    read=dataset,
)
DATA = INPUT.option(
    "KIND:PATH",
    f"Images: KIND:PATH, or only the word {KINDS[-1]} for scikit-learn's handwritten digits. KIND is "
    f"{listed(KINDS[:-1])}; array is an .npz or .npy file; table is a .csv file with labels of 0 and 1. Append "
    f"{' or '.join(f'#{split}' for split in SPLITS)} to choose the split (default: {SPLITS[0]}).",
    complete=complete_data,
)
CALIBRATION = PRECISION.option(
    "DATA",
    "Calibration images, required for fp8; without images, int8 is for OpenVINO on CPUs only. A folder, an .npz file, "
    "or KIND:PATH as in gmmvit parity "
    f"--data, such as cifar10:PATH. Append {' or '.join(f'#{split}' for split in SPLITS)} to choose the split "
    f"(default: {SPLITS[1]}).",
    complete=complete_data,
)
CALIBRATION_IMAGES = PRECISION.option("N", "Maximum number of calibration images.", default=512, min=1)
_NAME_ON_SERVER = "Name of the model on the server."
NAME = TARGET.option("NAME", _NAME_ON_SERVER, default="gmmvit")
SERVED_NAME = TARGET.option("NAME", _NAME_ON_SERVER, default="gmmvit")
REQUEST_PIXELS = TARGET.option(
    "N",
    "Maximum number of pixels in the images of a request. The server counts the pixels from the images' headers, "
    "and refuses a request with more pixels.",
    show_default=f"{DEFAULT_REQUEST_PIXELS}",
)
_OF_GRAPHS = (*ON_CPUS, *ON_GPUS)
RUNNER = MODEL.option(
    "NAME[:PRECISION]",
    f"Runner of the network, and its precision (default: fp32), such as openvino+kernels:bf16. NAME is "
    f"{listed(_OF_GRAPHS)}. +kernels adds this project's CPU kernels (compiled code for attention).",
    names=_OF_GRAPHS,
    read=lambda text: runner_from(text, _OF_GRAPHS),
    show_default="the choice of gmmvit optimize or gmmvit export for this machine",
)


def require_output(path: Path | None, *, force: bool, instead: str = "") -> None:
    """Refuse an output that exists, before any work.  instead: as for `require_free`.  Errors: OutputError."""
    from gmmvit_deploy.files.writing import require_free

    if path is not None:
        require_free(path, force=force, instead=instead)


def require_output_file(path: Path | None, *, force: bool) -> None:
    """Refuse an output file that exists, or whose folder does not exist, before any work.  Errors: OutputError."""
    from gmmvit_deploy.files.writing import require_free_file

    if path is not None:
        require_free_file(path, force=force)


TRITONSERVER = TARGET.option(
    "PROGRAM",
    "Path of the tritonserver program to run.",
    must_exist=True,
    show_default="from PATH, else from the nvidia-pytriton wheel",
)
ENGINE = INPUT.option("ENGINE", "Engine folder that gmmvit build wrote. Required to run TensorRT.", must_exist=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
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
        data = dataset(name)
        return Normalisation(mean=data.mean, std=data.std, labels=data.labels)
    if (mean is None) != (std is None):
        raise InputError(
            "--mean requires --std, and --std requires --mean",
            hint="type both, such as --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5",
        )
    if mean is None or std is None:
        return Normalisation()
    return Normalisation(mean=_numbers("--mean", mean), std=_numbers("--std", std))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError as exc:
        raise InputError(
            f"{option}: expected a number for each channel, such as 0.49,0.48,0.45 for R, G and B, got {text!r}"
        ) from exc


def labels_from(text: str | None) -> tuple[str, ...] | None:
    """Read labels from a file, or from text: one label, or commas between labels (`names_from_text`).

    Errors: InputError when the file cannot be read, or the labels have another form.
    """
    from gmmvit_deploy.images.names import names_from_text, text_from_bytes

    if text is None:
        return None
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


def thresholds_from(text: str | None) -> Thresholds | None:
    """Read thresholds from a number, a file with a number on each line, or a .json file: a list, or label → number.

    Errors: InputError when the file cannot be read, or holds something else.
    """
    from gmmvit_deploy.images.names import text_from_bytes

    if text is None:
        return None
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


def require_calibration(precisions: tuple[Precision, ...], calibration: str | None) -> None:
    """Refuse ``--calibration`` that cannot work, before anything is read.

    Errors: InputError when fp8 lacks calibration images, when no precision uses calibration images, or when the
    data cannot be opened.
    """
    from gmmvit_deploy.graphs.quantize import QUANTIZED
    from gmmvit_deploy.runtimes.programs.image_batches import require_source

    quantized = [precision for precision in precisions if precision in QUANTIZED]
    if calibration is None:
        if "fp8" in precisions:
            raise InputError(
                "fp8 needs calibration images",
                hint="add --calibration FOLDER, --calibration FILE.npz or --calibration KIND:PATH, with images like "
                "those that the model will classify",
            )
        return
    if not quantized:
        raise InputError(
            f"--calibration is for {' and '.join(QUANTIZED)}; {', '.join(precisions)} needs no calibration",
            hint=f"leave --calibration out, or type --precision {QUANTIZED[0]}",
        )
    require_source(calibration)


URL_VARIABLE = "GMMVIT_URL"
"""The address of the server, for the commands that send requests to it."""


def _require_file(option: str, variable: str) -> Callable[[Path], None]:
    def require(path: Path) -> None:
        if not path.is_file():
            raise InputError(
                f"{option} {path}: no such file",
                hint=f"type {option} and a file that exists, or set or unset {variable}",
            )

    return require


def access_from(
    key_file: Path | None = TARGET.option(
        "FILE",
        "File with the key for the server's gateway, alone on a line.",
        read=_require_file("--key-file", "GMMVIT_KEY_FILE"),
        envvar="GMMVIT_KEY_FILE",
        show_envvar=False,
        show_default="the variable GMMVIT_KEY_FILE",
    ),
    ca: Path | None = TARGET.option(
        "FILE",
        "PEM file of the certificate authority to trust for grpcs:// and https://.",
        read=_require_file("--ca", "GMMVIT_CA"),
        envvar="GMMVIT_CA",
        show_envvar=False,
        show_default="the variable GMMVIT_CA, else the public authorities",
    ),
) -> Access:
    """Read the files of ``--key-file`` and ``--ca``.  Errors: InputError when a file has another content."""
    from gmmvit_deploy.runtimes.programs.access import open_access

    # gRPC would print a line of its own beside the error, for a certificate that is not trusted. Read at its import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return open_access(key_file=key_file, ca=ca)


def server_from(
    access: Access,
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
) -> ServerTensorRT | None:
    """Return the server whose TensorRT must load an engine; None if no option names a server."""
    from gmmvit_deploy.runtimes.engines.compatibility import server_tensorrt as tensorrt_of
    from gmmvit_deploy.runtimes.programs.triton import TritonConnection

    if server_version is not None and server is not None:
        raise InputError(
            "--server-version and --server exclude each other",
            hint=f"type --server {server} or --server-version {server_version}, not both",
        )
    if server is not None:
        with TritonConnection(server, access=access) as connection:
            return tensorrt_of(triton=connection.version(), tensorrt=server_tensorrt, name=server)
    if server_version is None and server_tensorrt is None:
        return None
    return tensorrt_of(release=server_version, tensorrt=server_tensorrt)
