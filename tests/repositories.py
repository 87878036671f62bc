"""Small git repositories with files of this project, for tests of the release and of the hooks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def git(repository: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git with the repository's own settings only, and with the programs of this environment first on PATH."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    author = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.org"]
    command = ["git", "-C", str(repository), *author, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=variables)


def repository_with(folder: Path, names: Iterable[str]) -> Path:
    """Make ``folder`` a repository with these files of the project, committed. Skips the test where git is missing."""
    if shutil.which("git") is None:
        pytest.skip("there is no git on PATH")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "Files of the project")
    return folder
