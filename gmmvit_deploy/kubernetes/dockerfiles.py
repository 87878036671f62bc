"""Dockerfiles: of the server, slim for CPUs, without PyTorch, ONNX, CUDA and compiler; of the server with TensorRT
engines; and for bulk work on CPUs.

A repository holds all that the network needs at run time, also the compiled library of the CPU kernels, so the image
has only the packages that serve. Their versions are those of this environment, in which the repository was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from gmmvit_deploy import __version__
from gmmvit_deploy.errors import MissingDependencyError
from gmmvit_deploy.extras import require

__all__ = ["Package", "bulk_docker_files", "bulk_packages", "docker_files", "image_packages"]

_SERVES = (
    "cryptography",
    "numpy",
    "pillow",
    "python-multipart",
    "starlette",
    "tritonclient[grpc]",
    "typer",
    "uvicorn",
)
_CLASSIFIES = ("fsspec", "numpy", "onnx", "pillow", "pyarrow", "typer")
_STORES = "s3fs"
"""The driver of fsspec for s3://; each of its releases needs the same release of fsspec."""
_SERVER = "nvidia-pytriton"
"""Its wheel holds the Triton server; of its dependencies, the server needs numpy alone."""
_LEFT_OUT = {"openvino-telemetry"}
"""A program that reports the use of OpenVINO."""
_DEBIAN = ("haproxy", "tini")
_BASE = "python:3.11-slim-bookworm"
_WHEEL = f"gmmvit_deploy-{__version__}-py3-none-any.whl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """size: of the installed files, in bytes, as the wheel's own list states."""

    name: str
    version: str
    size: int


def image_packages(runtime: str, *, server: bool = True) -> list[Package]:
    """Return the packages of an image, with all that they need, in the versions of this environment.

    runtime: ``onnxruntime`` or ``openvino``, or "" for a server with backends of its own.  server: True to add Triton.
    Errors: MissingDependencyError when a package is not installed.
    """
    packages = _with_requirements([*_SERVES, *([runtime] if runtime else [])])
    if server:
        packages[_SERVER] = _installed(_SERVER)
    return _sized(packages)


def bulk_packages(runtime: str) -> list[Package]:
    """Return the packages of the image for bulk work, as `image_packages` does."""
    return _sized(_with_requirements([*_CLASSIFIES, runtime]))


def _with_requirements(waiting: list[str]) -> dict[str, Distribution]:
    packages: dict[str, Distribution] = {}
    requirement = require("packaging.requirements", package="packaging", extra="kubernetes").Requirement
    while waiting:
        needed = requirement(waiting.pop())
        name = needed.name.lower().replace("_", "-")
        if name in packages or name in _LEFT_OUT:
            continue
        packages[name] = _installed(name)
        waiting += _required(packages[name], needed, requirement)
    return packages


def _sized(packages: dict[str, Distribution]) -> list[Package]:
    return [
        Package(name=name, version=package.version, size=sum(file.size or 0 for file in package.files or ()))
        for name, package in sorted(packages.items())
    ]


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as exc:
        extra = {"openvino": "openvino", "onnxruntime": "cpu", "pyarrow": "bulk", "fsspec": "bulk"}.get(name, "serve")
        raise MissingDependencyError(f"{name}, which the server's image needs,", extra=extra) from exc


def _required(package: Distribution, asked: Any, requirement: Any) -> list[str]:
    """Return the requirements of a package on this platform, with those of the extras that are asked for."""
    names = []
    for text in package.requires or ():
        needed = requirement(text)
        extras = [*asked.extras, ""]
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            names.append(needed.name + (f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""))
    return names


def docker_files(runtime: str) -> dict[str, str]:
    """Return path → text of the Dockerfiles and of their lists of packages.

    runtime: of the repository that the slim image serves, ``onnxruntime`` or ``openvino``.
    """
    slim, tensorrt = image_packages(runtime), image_packages("", server=False)
    return {
        "docker/cpu/Dockerfile": _slim_text(slim),
        "docker/cpu/requirements.txt": _requirements(slim),
        "docker/tensorrt/Dockerfile": _tensorrt_text(),
        "docker/tensorrt/requirements.txt": _requirements(tensorrt),
    }


def bulk_docker_files(runtime: str, *, store: bool) -> dict[str, str]:
    """Return path → text of the Dockerfile for bulk work.  store: True to add the driver for s3://."""
    packages = bulk_packages(runtime)
    return {
        "docker/bulk/Dockerfile": _bulk_text(packages, store=store),
        "docker/bulk/requirements.txt": _requirements(packages),
    }


def _requirements(packages: Sequence[Package]) -> str:
    return "".join(f"{package.name}=={package.version}\n" for package in packages)


_APT = """# Without versions, because the newest packages of the base's release have its security updates.
# hadolint ignore=DL3008
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends {packages} \\
    && rm -rf /var/lib/apt/lists/*
"""
_INSTALL = """COPY requirements.txt {wheel} /tmp/wheels/
RUN python3 -m pip install --no-cache-dir --no-deps{more} \\
    --requirement /tmp/wheels/requirements.txt /tmp/wheels/{wheel}{also}
ENV PYTHONDONTWRITEBYTECODE=1
# 1000 is the user of the manifests. tini passes SIGTERM to gmmvit serve alone, and removes ended processes.
USER 1000:1000
ENTRYPOINT ["tini", "--", "gmmvit"]
CMD ["--help"]
"""


def _slim_text(packages: Sequence[Package]) -> str:
    head = _slim_head("The server of gmmvit-deploy on CPUs", packages, "the base, HAProxy and tini")
    return head + _APT.format(packages=" ".join(_DEBIAN)) + _INSTALL.format(wheel=_WHEEL, more="", also="")


def _bulk_text(packages: Sequence[Package], *, store: bool) -> str:
    uncounted, also = "the base and tini", ""
    if store:
        uncounted += f"; {_STORES}, the driver for s3://, and what it needs besides, in versions that pip chooses"
        fsspec = next(package.version for package in packages if package.name == "fsspec")
        constraint = "--constraint /tmp/wheels/requirements.txt"
        also = f" \\\n    && python3 -m pip install --no-cache-dir {constraint} {_STORES}=={fsspec}"
    install = _INSTALL.format(wheel=_WHEEL, more="", also=also).replace("gmmvit serve alone", "gmmvit alone")
    head = _slim_head("gmmvit classify for bulk work on CPUs", packages, uncounted)
    return head + _APT.format(packages="tini") + install


def _slim_head(title: str, packages: Sequence[Package], uncounted: str) -> str:
    mib = sum(package.size for package in packages) / 2**20
    return f"""# {title}: no compiler, no CUDA, no PyTorch.
# Its {len(packages)} Python packages have {mib:.0f} MiB of files, by the lists in their wheels;
# not counted: {uncounted}.
# Put {_WHEEL} beside this file, then: docker build --tag IMAGE .
# Give the base by its digest for the same image again: --build-arg BASE=python@sha256:...
ARG BASE={_BASE}
FROM ${{BASE}}
"""


def _tensorrt_text() -> str:
    return (
        f"""# The server of gmmvit-deploy with TensorRT engines, on NVIDIA's image of Triton.
# The engine decides the release: gmmvit doctor BUNDLE --server-version RELEASE states what a release can load.
# Put {_WHEEL} beside this file, then: docker build --build-arg RELEASE=25.09 --tag IMAGE .
ARG RELEASE
FROM nvcr.io/nvidia/tritonserver:${{RELEASE}}-py3
USER 0
"""
        + _APT.format(packages=" ".join((*_DEBIAN, "python3-pip")))
        + _INSTALL.format(wheel=_WHEEL, more=" --break-system-packages", also="")
    )
