"""Options that several commands share, and what their text means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.engines.compatibility import ServerTensorRT
    from gmmvit_deploy.serving.model_configs import CpuKernels
    from gmmvit_deploy.sources.hints import LoadHints

__all__ = [
    "CHANNELS",
    "CPU_KERNELS",
    "FORCE",
    "HEADS",
    "IMAGE_SIZE",
    "MASK_FORM",
    "PRESET",
    "SERVER",
    "SERVER_TENSORRT",
    "SERVER_VERSION",
    "Normalisation",
    "cpu_kernels_from",
    "hints_from",
    "labels_from",
    "normalisation_from",
    "server_from",
]

HEADS = typer.Option(
    None, "--heads", help="Attention heads (of the first stage), where the file cannot tell: plain, ELM, shared masks."
)
PRESET = typer.Option(None, "--preset", help="Name of a known model, such as vit or vit_d15.")
MASK_FORM = typer.Option(
    "stored",
    "--mask-form",
    help="stored: the mask raises the stored base to a power, as the released code does. "
    "closed: the model was trained with the paper's formula from distances.",
)
IMAGE_SIZE = typer.Option(
    None, "--image-size", help="Side of the images in pixels, where no tensor of the file tells it."
)
CHANNELS = typer.Option(
    None,
    "--channels",
    help="Channels of the images: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha  [default: what the tensors tell, "
    "else 3]",
)
SERVER_VERSION = typer.Option(None, help="Release of NVIDIA's Triton container that will serve, such as 25.04.")
SERVER = typer.Option(None, help="A live Triton server: grpc://host:port or http://host:port.")
SERVER_TENSORRT = typer.Option(None, help="TensorRT of the server, such as 10.9.0, where its release does not tell.")
CPU_KERNELS = typer.Option(
    None,
    "--cpu-kernels",
    help="Our own CPU kernels: auto (where they can be had), or off (the runtime's own operators).  [default: auto]",
)
FORCE = typer.Option(False, "--force", help="Replace the output folder if it exists.")


def hints_from(
    heads: int | None,
    preset: str | None,
    mask_form: str,
    *,
    image_size: int | None = None,
    channels: int | None = None,
) -> LoadHints:
    from gmmvit_deploy.sources.hints import LoadHints

    if mask_form not in ("stored", "closed"):
        raise InputError(f"--mask-form is {mask_form!r}; stored or closed was wanted")
    return LoadHints(
        heads=heads,
        preset=preset,
        closed_form=True if mask_form == "closed" else None,
        image_size=image_size,
        channels=channels,
    )


def cpu_kernels_from(text: str | None) -> CpuKernels | None:
    """None where ``--cpu-kernels`` is not given.  Errors: InputError."""
    if text not in (None, "auto", "off"):
        raise InputError(f"--cpu-kernels is {text!r}; expected auto or off")
    return text  # type: ignore[return-value]  # checked above


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """mean, std: a number a channel, or None.  labels: the data set's, None where no data set was named."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None


def normalisation_from(name: str | None, mean: str | None, std: str | None) -> Normalisation:
    """Read ``--dataset``, or ``--mean --std``, or neither.  The number of channels is checked against the network."""
    from gmmvit_deploy.datasets import dataset

    if name is not None:
        if mean is not None or std is not None:
            raise InputError("--dataset already says mean and std; give it, or --mean and --std")
        data = dataset(name)
        return Normalisation(mean=data.mean, std=data.std, labels=data.labels)
    if (mean is None) != (std is None):
        raise InputError("--mean and --std go together")
    if mean is None or std is None:
        return Normalisation()
    return Normalisation(mean=_numbers("--mean", mean), std=_numbers("--std", std))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError as exc:
        raise InputError(
            f"{option} is {text!r}; expected a number for each channel, such as 0.49,0.48,0.45 for R, G and B"
        ) from exc


def labels_from(text: str | None) -> tuple[str, ...] | None:
    """A file with one label a line, or labels with commas between them."""
    if text is None:
        return None
    path = Path(text)
    if "," in text and not path.exists():
        return tuple(part.strip() for part in text.split(","))
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise InputError(f"--labels {text}: a file with one label a line was wanted: {reason}") from exc


def server_from(release: str | None, url: str | None, tensorrt: str | None) -> ServerTensorRT | None:
    """The server whose TensorRT is to load an engine; None when nothing was said of one."""
    from gmmvit_deploy.engines.compatibility import server_tensorrt
    from gmmvit_deploy.runtime.triton import TritonConnection

    if release is not None and url is not None:
        raise InputError("--server-version and --server both say which server; give one")
    if url is not None:
        with TritonConnection(url) as connection:
            return server_tensorrt(triton=connection.version(), tensorrt=tensorrt, name=url)
    if release is None and tensorrt is None:
        return None
    return server_tensorrt(release=release, tensorrt=tensorrt)
