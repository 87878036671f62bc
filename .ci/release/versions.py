"""What a release is made of: the version, the changelog's heading, the committed files, the supported Pythons.

The topmost heading of CHANGELOG.md is ``## [VERSION] - YYYY-MM-DD``:

- a version such as 0.2.0 needs the heading of that version;
- a version that ends in .devN may have the heading ``## [Unreleased]``;
- a rehearsal (``--rehearsal``) accepts ``## [Unreleased]`` for every version, and uncommitted changes.
"""

from __future__ import annotations

import re
from pathlib import Path

from release.steps import ReleaseError, git

__all__ = ["check_changelog", "check_committed", "package_version", "supported_pythons", "tracked_files"]

_HEADING = re.compile(r"## \[(?P<name>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?\s*")
_REHEARSE = "or rehearse: make release ARGS=--rehearsal"


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
    """Return the paths of the files under version control, relative to ``root``, sorted.  Errors: ReleaseError."""
    names = git(root, "ls-files", "-z").split("\0")
    return sorted(name for name in names if name and (root / name).is_file())


def check_committed(root: Path) -> None:
    """Refuse a working tree that differs from its commit.  Errors: ReleaseError."""
    changes = git(root, "status", "--porcelain").splitlines()
    if changes:
        raise ReleaseError(
            f"{root}: {len(changes)} files are not committed, the first is {changes[0][3:]}",
            hint=f"commit or remove them, {_REHEARSE}",
        )


def supported_pythons(root: Path) -> list[str]:
    """Return the Python versions that pyproject.toml classifies as supported: ["3.10", ...].  Errors: ReleaseError."""
    path = root / "pyproject.toml"
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', path.read_text(encoding="utf-8"))
    if not versions:
        raise ReleaseError(f'{path}: expected classifiers "Programming Language :: Python :: 3.X", got none')
    return versions
