"""Dockerfiles of the server and for bulk work, and the Python packages of their images.

A repository holds all that the network needs at run time, also the compiled library of the CPU kernels, so the image
has only the packages that serve. Their versions are those of this environment, in which the repository was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from gmmvit_deploy import __version__
from gmmvit_deploy.errors import MissingDependencyError
from gmmvit_deploy.extras import require
from gmmvit_deploy.kubernetes.templates import docker_file
from gmmvit_deploy.serving.names import OLDEST_CUDA_RELEASE, OLDEST_RELEASE

__all__ = ["Package", "bulk_docker_files", "bulk_packages", "docker_files", "image_packages"]

_SERVES = (
    "cryptography",
    "httptools",
    "jinja2",
    "numpy",
    "pillow",
    "python-multipart",
    "starlette",
    "tritonclient[grpc]",
    "typer",
    "uvicorn",
    "uvloop",
)
_CLASSIFIES = ("fsspec", "jinja2", "numpy", "onnx", "pillow", "pyarrow", "typer")
_SERVER = "nvidia-pytriton"
"""Its wheel holds the Triton server; of its dependencies, the server needs numpy alone."""
_LEFT_OUT = {"openvino-telemetry"}
"""A program that reports the use of OpenVINO."""


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
    """Return path → text of the Dockerfile of the server and of its list of packages.

    runtime: of a network in the python backend, ``onnxruntime`` or ``openvino``, which the slim image serves; "" for a
    network in a backend that only NVIDIA's image of Triton has.
    """
    if runtime:
        return _docker_files("cpu", image_packages(runtime), debian="haproxy tini")
    return _docker_files("nvidia", image_packages("", server=False), debian="haproxy tini python3-pip")


def bulk_docker_files(runtime: str, *, store: bool) -> dict[str, str]:
    """Return path → text of the Dockerfile for bulk work and of its list of packages.

    store: True to add the driver of fsspec for s3://, of which each release needs the same release of fsspec.
    """
    packages = bulk_packages(runtime)
    fsspec = next(package.version for package in packages if package.name == "fsspec")
    return _docker_files("bulk", packages, debian="tini", s3fs=fsspec if store else "")


def _docker_files(kind: str, packages: list[Package], *, debian: str, s3fs: str = "") -> dict[str, str]:
    text = docker_file(
        "Dockerfile.j2",
        kind=kind,
        wheel=f"gmmvit_deploy-{__version__}-py3-none-any.whl",
        count=len(packages),
        mib=f"{sum(package.size for package in packages) / 2**20:.0f}",
        debian=debian,
        s3fs=s3fs,
        oldest=(OLDEST_RELEASE, OLDEST_CUDA_RELEASE),
    )
    return {
        f"docker/{kind}/Dockerfile": text,
        f"docker/{kind}/requirements.txt": "".join(f"{package.name}=={package.version}\n" for package in packages),
    }
