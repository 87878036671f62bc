"""Build the sdist and the wheels, and compare their files with those under version control.

The pure wheel runs everywhere; there, a C++ compiler of the user's compiles the CPU kernels.  The wheel of each
platform also holds the library of the kernels (`compiled_kernels`), and pip prefers it.

The comparison has no list of its own: a package file that is no Python (py.typed, the kernels' C sources, JSON schemas)
is missed as surely as a module, and a new file needs no entry here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from release.compiled_kernels import PLATFORMS, compiled_kernels
from release.steps import ReleaseError, run, tracked_files

__all__ = ["Archives", "build", "check_metadata", "check_sdist", "check_wheel"]

_PACKAGES = {"gmmvit_deploy/": "gmmvit_deploy/", "cli/gmmvit_cli/": "gmmvit_cli/"}
"""Folder in the repository → folder in the wheel."""
_WRITTEN_BY_BUILD = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
_LIBRARY = re.compile(r"gmmvit_deploy/runtimes/kernels/openvino-.*\.so")
"""The library of the kernels in the wheel of a platform."""
_LISTED = 5  # names in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Archives:
    """wheels: the pure wheel, then that of each platform."""

    sdist: Path
    wheels: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.sdist, *self.wheels


def build(root: Path, out: Path, platforms: Sequence[str] = tuple(PLATFORMS)) -> Archives:
    """Build the sdist from a copy of the tracked files, and the wheels from the sdist, into ``out``.

    Only a copy keeps files that merely lie in the working tree out of the sdist.  The wheels show that the sdist is
    complete.  platforms: names in `PLATFORMS`.  Errors: ReleaseError.
    """
    with tempfile.TemporaryDirectory(prefix="gmmvit-release-") as folder:
        sources, built = Path(folder) / "sources", Path(folder) / "dist"
        for name in tracked_files(root):
            target = sources / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built)]
        run([*command, "--sdist", str(sources)], "build the sdist", cwd=Path(folder), environment=os.environ)
        (sdist,) = built.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(Path(folder) / "unpacked", filter="data")
        (unpacked,) = (Path(folder) / "unpacked").iterdir()
        environments = [dict(os.environ)]
        for platform in platforms:
            library = compiled_kernels(platform, Path(folder))
            environments.append({**os.environ, "GMMVIT_KERNELS_IN_WHEEL": str(library)})
        for environment in environments:
            run([*command, "--wheel", str(unpacked)], "build the wheel", cwd=Path(folder), environment=environment)
        out.mkdir(parents=True, exist_ok=True)
        wheels = sorted(built.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)
        files = [Path(shutil.copy2(file, out)) for file in (sdist, *wheels)]
        return Archives(sdist=files[0], wheels=tuple(files[1:]))


def check_metadata(archives: Archives) -> None:
    """Run ``twine check --strict``.  Errors: ReleaseError."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives.files)]
    run(command, "check the metadata", environment=os.environ)


def check_wheel(wheel: Path, tracked: Sequence[str], version: str) -> None:
    """Compare the files of the wheel with the tracked files of both packages, and the wheel's library.

    Errors: ReleaseError with the files that are missing and those that do not belong.
    """
    expected = {f"gmmvit_deploy-{version}.dist-info/{name}" for name in _WRITTEN_BY_BUILD}
    for folder, installed in _PACKAGES.items():
        expected |= {installed + name.removeprefix(folder) for name in tracked if name.startswith(folder)}
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
    if "-manylinux" in wheel.name:
        expected.add(next(filter(_LIBRARY.fullmatch, files), _LIBRARY.pattern))
    _compare(wheel, expected, files)


def check_sdist(sdist: Path, tracked: Sequence[str], version: str) -> None:
    """Compare the files of the sdist with all tracked files.  Errors: as `check_wheel`."""
    expected = {f"gmmvit_deploy-{version}/{name}" for name in [*tracked, "PKG-INFO"]}
    with tarfile.open(sdist) as archive:
        _compare(sdist, expected, {member.name for member in archive if not member.isdir()})


def _compare(archive: Path, expected: set[str], files: set[str]) -> None:
    problems = []
    for label, names in (("missing", expected - files), ("does not belong", files - expected)):
        if names:
            rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            problems.append(f"{label}: {', '.join(sorted(names)[:_LISTED])}{rest}")
    if problems:
        raise ReleaseError(
            f"{archive.name}: {'; '.join(problems)}",
            hint="[tool.hatch.build.targets] in pyproject.toml and .gitignore decide what the archives hold",
        )
