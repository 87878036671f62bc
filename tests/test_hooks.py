"""The hook that `make hooks` turns on, in a repository of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.repositories import git, repository_with

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

BADLY_FORMATTED = "x = { 'a':1 }\n"
BADLY_TYPED = 'def count() -> int:\n    return "none"\n'
GOOD = 'def count() -> int:\n    return len("good")\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    names = ["pyproject.toml", "Makefile", ".githooks/pre-commit", ".ci/constraints.txt"]
    repository = repository_with(tmp_path, names)
    (repository / ".git" / "info" / "exclude").write_text("installed\n.ruff_cache\n.mypy_cache\n")
    (repository / "installed").touch()
    # As if `make` had set up the environment.
    subprocess.run(["make", "hooks", "INSTALLED=installed"], cwd=repository, check=True, env=_without_git())
    return repository


def _without_git() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def commit(repository: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    (repository / name).parent.mkdir(parents=True, exist_ok=True)
    (repository / name).write_text(text)
    git(repository, "add", name)
    return git(repository, "commit", "--quiet", "--message", f"Add {name}", check=False)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tests/sizes.py", BADLY_FORMATTED, '+x = {"a": 1}'),
        ("gmmvit_deploy/sizes.py", BADLY_TYPED, "Incompatible return value type"),
    ],
    ids=["format", "types"],
)
def test_a_commit_that_does_not_pass_is_refused(repository: Path, name: str, text: str, reason: str) -> None:
    answer = commit(repository, name, text)
    output = answer.stdout + answer.stderr
    assert answer.returncode == 1, output
    assert name in output
    assert reason in output
    assert "Error: what is staged does not pass" in answer.stderr
    assert git(repository, "rev-list", "--count", "HEAD").stdout == "1\n"
    assert commit(repository, name, GOOD).returncode == 0


def test_what_is_staged_counts_and_not_the_working_tree(repository: Path) -> None:
    (repository / "sizes.py").write_text(BADLY_FORMATTED)
    git(repository, "add", "sizes.py")
    (repository / "sizes.py").write_text(GOOD)
    assert git(repository, "commit", "--message", "Staged", check=False).returncode == 1
    git(repository, "add", "sizes.py")
    (repository / "sizes.py").write_text(BADLY_FORMATTED)
    assert git(repository, "commit", "--message", "Staged", check=False).returncode == 0
