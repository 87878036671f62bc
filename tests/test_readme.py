"""The README says what the program does."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.tables import ENGINES, OVERVIEW, engines_page, overview, tables
from gmmvit_deploy.artifacts import Bundle

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def console_commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ gmmvit")]


def test_commands_and_options_exist(gmmvit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    named = console_commands() + re.findall(r"`(gmmvit [a-z]+[^`]*)`", README)
    assert len(named) > 8
    helps: dict[str, str] = {}
    for line in named:
        command = line.split()[1]
        if command.startswith("--"):
            continue
        if command not in helps:
            answer = gmmvit(command, "--help")
            assert answer.returncode == 0, command
            helps[command] = answer.stdout
        for option in re.findall(r"(--[a-z-]+)", line):
            assert option in helps[command], line


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets


def test_quoted_tables_are_those_of_the_results_and_of_the_policy() -> None:
    for marker, table in tables().items():
        assert f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->" in README, (
            f"run benchmarks/tables.py --write ({marker})"
        )


def test_the_page_of_engines_is_that_of_the_results() -> None:
    assert ENGINES.read_text() == engines_page()


def test_the_page_of_results_is_that_of_the_results() -> None:
    assert OVERVIEW.read_text() == overview()


def test_python_example_runs(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundle").symlink_to(bundle.path)
    names: dict[str, object] = {}
    exec(textwrap.dedent(example), names)  # noqa: S102 - our own README
    assert names["logits"].shape == names["wanted"].shape


def test_package_versions_agree(gmmvit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    from importlib.metadata import version

    import gmmvit_deploy

    assert version("gmmvit-deploy") == gmmvit_deploy.__version__
