"""Find the Triton server of the nvidia-pytriton wheel, or fetch it once into a cache folder.

This package does not depend on nvidia-pytriton: of its requirements the server needs none, and its ``numpy<2`` would
decide which numpy users have. ``pip install --no-deps`` fetches the wheel, with its SHA-256, from the index that this
user's pip is set to.

    <cache>/triton-server-0.7.0        what pip installed; the folder appears only when it is complete
    <cache>/triton-server-0.7.0.lock   held by the process that fetches; other processes wait for it

The folder is ``$XDG_CACHE_HOME/gmmvit-deploy``; without XDG_CACHE_HOME it is ``~/.cache/gmmvit-deploy``.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

from gmmvit_deploy.errors import OutputError, ServerError
from gmmvit_deploy.files.caches import cache_folder
from gmmvit_deploy.files.writing import new_folder
from gmmvit_deploy.progress import OnProgress, Progress, ignore

PACKAGE, VERSION = "nvidia-pytriton", "0.7.0"
_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
_DOWNLOAD_BYTES = 55_369_373
TRITON = "2.51.0"
"""The version of the server in the wheel."""
NEWEST_PYTHON = (3, 13)
"""The newest Python for which the wheel has a stub."""
_OTHERWISE = (
    "or serve in a container, which gmmvit manifests writes a Dockerfile for, or add --tritonserver PATH to use the "
    "server of one of NVIDIA's containers"
)


def wheel_folder(on_progress: OnProgress = ignore) -> Path:
    """Return the folder that holds ``pytriton``: site-packages if nvidia-pytriton is installed, else the cache folder.

    Errors: ServerError when the wheel does not support this Python or processor, or cannot be fetched. OutputError.
    """
    package = importlib.util.find_spec("pytriton")
    if package is not None and package.origin is not None:
        return Path(package.origin).parents[1]
    _require_supported()
    try:
        folder = cache_folder() / f"triton-server-{VERSION}"
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_name(f"{folder.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not folder.is_dir():  # else another process has fetched it in the meantime
                    on_progress(Progress(f"download the Triton server, {_DOWNLOAD_BYTES / 1e6:.0f} MB, into {folder}"))
                    _fetch(folder)
    except (OSError, RuntimeError, OutputError) as exc:
        raise OutputError(
            f"the Triton server cannot be written to the cache: {exc}",
            hint="set XDG_CACHE_HOME to a folder that this user may write, on a disk with 200 MB free",
        ) from exc
    return folder


def _require_supported() -> None:
    if sys.version_info[:2] <= NEWEST_PYTHON and platform.machine() == "x86_64":
        return
    newest = ".".join(map(str, NEWEST_PYTHON))
    raise ServerError(
        f"the Triton server of {PACKAGE} {VERSION} runs with Python up to {newest} on x86_64; this is Python "
        f"{sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}",
        hint=f"use Python 3.11 to {newest} on x86_64, {_OTHERWISE}",
    )


def _fetch(folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ServerError(
            f"the Triton server cannot be downloaded: {sys.executable} has no pip",
            hint=f"type {sys.executable} -m ensurepip, or uv pip install pip in an environment of uv; {_OTHERWISE}",
        )
    with new_folder(folder) as staging:
        listed = staging / "requirements.txt"
        listed.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{_SHA256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
        what = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--require-hashes", "--requirement", str(listed)]
        answer = subprocess.run(
            [*pip, *what, "--target", str(staging)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PIP_USER": "0"},  # pip refuses --user, which may be a user's setting, with --target
        )
        if answer.returncode:
            lines = [line for line in answer.stderr.splitlines() if line.strip()] or [f"status {answer.returncode}"]
            raise ServerError(
                f"the Triton server could not be downloaded: pip install {PACKAGE}=={VERSION}: {lines[-1]}",
                hint=f"without a network: type pip download --no-deps {PACKAGE}=={VERSION} on a machine that has one, "
                f"and pip install --no-deps on the file here; {_OTHERWISE}",
            )
