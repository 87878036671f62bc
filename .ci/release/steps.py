"""What the steps of a release share: how a step fails, how it runs a program, and what the repository states.

The topmost heading of CHANGELOG.md is ``## [VERSION] - YYYY-MM-DD``:

- a version such as 0.2.0 needs the heading of that version;
- a version that ends in .devN may have the heading ``## [Unreleased]``;
- a rehearsal (``--rehearsal``) accepts ``## [Unreleased]`` for every version, and uncommitted changes.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = [
    "ReleaseError",
    "check_changelog",
    "check_committed",
    "clean_environment",
    "package_version",
    "run",
    "supported_pythons",
    "tracked_files",
]

_HEADING = re.compile(r"## \[(?P<name>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?\s*")
_REHEARSE = "or rehearse: make release ARGS=--rehearsal"
_LINES = 30  # of a failed program's output


class ReleaseError(Exception):
    """A step failed.  hint: what to do, or the output of the program that failed."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def clean_environment() -> dict[str, str]:
    """Return the environment variables without those that lead Python or gmmvit to other code or settings."""
    foreign = ("PYTHON", "VIRTUAL_ENV", "GMMVIT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def run(
    command: Sequence[str], step: str, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program and return its stdout.

    step: what the program does, for the message.  environment: `clean_environment` by default.
    Errors: ReleaseError with the end of the program's output.
    """
    variables = clean_environment() if environment is None else dict(environment)
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=variables)
    if answer.returncode:
        output = (answer.stdout + answer.stderr).strip().splitlines()[-_LINES:]
        raise ReleaseError(f"{step}: {command[0]} ended with status {answer.returncode}", hint="\n".join(output))
    return answer.stdout


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints.  Errors: ReleaseError."""
    try:
        return run(["git", "-C", str(root), *arguments], f"git {arguments[0]}", environment=os.environ)
    except FileNotFoundError as exc:
        raise ReleaseError(f"git {arguments[0]}: there is no git on PATH", hint="install git") from exc


def package_version(root: Path) -> str:
    """Return ``__version__`` of the package without importing it.  Errors: ReleaseError."""
    path = root / "gmmvit_deploy" / "__init__.py"
    match = re.search(r'^__version__ = "([^"]+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ReleaseError(f'{path}: expected a line __version__ = "VERSION", got no such line')
    return match.group(1)


def check_changelog(changelog: str, version: str, *, rehearsal: bool = False) -> None:
    """Compare the topmost heading of the changelog's text with the version.  Errors: ReleaseError."""
    expected = f"'## [{version}] - YYYY-MM-DD'"
    heading = next((line for line in changelog.splitlines() if line.startswith("## ")), None)
    match = _HEADING.fullmatch(heading or "")
    # A version has a date, and [Unreleased] has none.
    if match is None or (match["name"] == "Unreleased") != (match["date"] is None):
        got = "no heading" if heading is None else repr(heading)
        raise ReleaseError(f"CHANGELOG.md: expected {expected} or '## [Unreleased]' as the topmost heading, got {got}")
    if match["name"] == "Unreleased":
        if not rehearsal and re.search(r"\.dev\d+$", version) is None:
            raise ReleaseError(
                f"CHANGELOG.md: version {version} needs {expected} as the topmost heading, got '## [Unreleased]'",
                hint=f"rename the heading, {_REHEARSE}",
            )
    elif match["name"] != version:
        raise ReleaseError(
            f"CHANGELOG.md: the topmost heading names version {match['name']}, gmmvit_deploy/__init__.py has {version}",
            hint="change the heading or the version, so that they agree",
        )


def tracked_files(root: Path) -> list[str]:
    """Return the paths of the files under version control, relative to ``root``, sorted.

    A link to a folder stands for the files in that folder: archives hold copies of them.
    Errors: ReleaseError.
    """
    names = [name for name in _git(root, "ls-files", "-z").split("\0") if name]
    files = [name for name in names if (root / name).is_file()]
    for link in (name for name in names if (root / name).is_dir()):
        folder = f"{(root / link).resolve().relative_to(root.resolve())}/"
        files += [f"{link}/{name.removeprefix(folder)}" for name in files if name.startswith(folder)]
    return sorted(files)


def check_committed(root: Path) -> None:
    """Refuse a working tree that differs from its commit.  Errors: ReleaseError."""
    changes = _git(root, "status", "--porcelain").splitlines()
    if changes:
        raise ReleaseError(
            f"{root}: {len(changes)} files are not committed, the first is {changes[0][3:]}",
            hint=f"commit or remove them, {_REHEARSE}",
        )


def supported_pythons(root: Path) -> list[str]:
    """Return the Python versions that pyproject.toml classifies as supported: ["3.11", ...].  Errors: ReleaseError."""
    path = root / "pyproject.toml"
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', path.read_text(encoding="utf-8"))
    if not versions:
        raise ReleaseError(f'{path}: expected classifiers "Programming Language :: Python :: 3.X", got none')
    return versions
