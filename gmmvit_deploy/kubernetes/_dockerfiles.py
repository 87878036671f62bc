"""Dockerfiles of the server and for bulk work, and the Python packages of their images.

A repository holds all that the network needs at run time, also the compiled library of the CPU kernels, so the image
has only the packages that serve. Their versions are those of this environment, in which the repository was written.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from gmmvit_deploy import __version__
from gmmvit_deploy.errors import MissingDependencyError
from gmmvit_deploy.extras import require
from gmmvit_deploy.kubernetes.templates import docker_file
from gmmvit_deploy.runtimes.engines.releases import NEWEST, triton_in_words
from gmmvit_deploy.serving.names import OLDEST_IMAGE_RELEASE
from gmmvit_deploy.serving.server_wheel import NEWEST_PYTHON, PACKAGE, TRITON, VERSION

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
_CLASSIFIES = ("fsspec", "jinja2", "numpy", "onnx", "onnx-ir", "pillow", "pyarrow", "typer")
_THIS_PYTHON = ".".join(map(str, sys.version_info[:2]))
"""Python of an image, because the versions of its packages are those of this Python."""
_WHEEL_PYTHON = ".".join(map(str, min(sys.version_info[:2], NEWEST_PYTHON)))
"""Python of the image with the server of the wheel."""
_NVIDIA_PYTHON = "3.12"
"""Python of NVIDIA's image of Triton, since `OLDEST_IMAGE_RELEASE`."""
_LEFT_OUT = {"openvino-telemetry"}
"""A program that reports the use of OpenVINO."""


def image_packages(runtimes: Collection[str], *, server: bool = True) -> dict[str, str]:
    """Return package → version of an image, with all that the packages need, as they are in this environment.

    runtimes: ``onnxruntime``, ``openvino``, both, or none for a server with backends of its own.
    server: True to add Triton.
    Errors: MissingDependencyError when a package is not installed.
    """
    python = _WHEEL_PYTHON if server else _NVIDIA_PYTHON
    packages = _with_requirements([*_SERVES, *runtimes], python)
    return {**packages, PACKAGE: VERSION} if server else packages


def bulk_packages(runtime: str) -> dict[str, str]:
    """Return the packages of the image for bulk work, as `image_packages` does."""
    return _with_requirements([*_CLASSIFIES, runtime], _THIS_PYTHON)


def _with_requirements(waiting: list[str], python: str) -> dict[str, str]:
    packages: dict[str, str] = {}
    requirement = require("packaging.requirements", package="packaging", extra="kubernetes").Requirement
    while waiting:
        needed = requirement(waiting.pop())
        name = needed.name.lower().replace("_", "-")
        if name in packages or name in _LEFT_OUT:
            continue
        package = _installed(name)
        packages[name] = package.version
        waiting += _required(package, needed, requirement, python)
    return packages


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as exc:
        extra = {"openvino": "openvino", "onnxruntime": "cpu", "pyarrow": "bulk", "fsspec": "bulk"}.get(name, "serve")
        raise MissingDependencyError(f"{name}, which the server's image needs,", extra=extra) from exc


def _required(package: Distribution, asked: Any, requirement: Any, python: str) -> list[str]:
    """Return the requirements of a package for a Python on this platform, with those of the extras that are asked for.

    python: the version of the image's Python, such as ``3.13``.
    """
    names = []
    image = {"python_version": python, "python_full_version": f"{python}.0"}
    for text in package.requires or ():
        needed = requirement(text)
        extras = [*asked.extras, ""]
        if needed.marker is None or any(needed.marker.evaluate({**image, "extra": extra}) for extra in extras):
            names.append(needed.name + (f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""))
    return names


def docker_files(runtimes: Collection[str], *, engine: bool, cpu: bool) -> dict[str, str]:
    """Return path → text of the Dockerfiles of the server and of their lists of packages.

    ``docker/nvidia`` begins with NVIDIA's image of Triton; ``docker/cpu`` is small, with the server of the wheel, which
    has only the python backend.
    runtimes: of the networks in the python backend, ``onnxruntime`` and ``openvino``.
    engine: True if an engine decides the release of NVIDIA's image.
    cpu: False if a network is in a backend that only NVIDIA's image has, so that ``docker/cpu`` is left out.
    """
    # NVIDIA's image has a numpy that its server works with: releases before 24.12 return empty outputs with numpy 2.
    packages = image_packages(runtimes, server=False)
    del packages["numpy"]
    release = "" if engine else NEWEST
    files = _docker_files("nvidia", packages, debian="haproxy tini python3-pip", release=release)
    if cpu:
        files |= _docker_files("cpu", image_packages(runtimes), debian="haproxy tini")
    return files


def bulk_docker_files(runtime: str, *, store: bool) -> dict[str, str]:
    """Return path → text of the Dockerfile for bulk work and of its list of packages.

    store: True to add the driver of fsspec for s3://, of which each release needs the same release of fsspec.
    """
    packages = bulk_packages(runtime)
    return _docker_files("bulk", packages, debian="tini", s3fs=packages["fsspec"] if store else "")


def _docker_files(
    kind: str, packages: Mapping[str, str], *, debian: str, s3fs: str = "", release: str = ""
) -> dict[str, str]:
    text = docker_file(
        "Dockerfile.j2",
        kind=kind,
        wheel=f"gmmvit_deploy-{__version__}-py3-none-any.whl",
        debian=debian,
        python=_WHEEL_PYTHON if kind == "cpu" else _THIS_PYTHON,
        s3fs=s3fs,
        oldest=OLDEST_IMAGE_RELEASE,
        release=release,
        wheel_server=triton_in_words(TRITON),
    )
    return {
        f"docker/{kind}/Dockerfile": text,
        f"docker/{kind}/requirements.txt": "".join(f"{name}=={packages[name]}\n" for name in sorted(packages)),
    }
