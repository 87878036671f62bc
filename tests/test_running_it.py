"""The tables of docs/pages/running_it.md name every option, every variable, every log line, and tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from gmmvit_cli.main import app
from gmmvit_deploy.serving.front.process import _EXIT_TIMEOUT_S
from gmmvit_deploy.serving.gateway.haproxy import _END_S
from gmmvit_deploy.serving.gateway.service import _STOP_S
from gmmvit_deploy.serving.server import _EXIT_S, _MEMORY, ServerOptions
from tests.documented import ROOT, first_column, table

PAGE = "running_it.md"
COMMANDS = ("serve", "gateway", "rollout")
GATEWAY = "Gateway"
"""The panel of the options of ``gmmvit serve`` that need ``--gateway``."""
GROUP: Any = get_command(app)


def cell(number: int, row: list[str]) -> str:
    return row[number].strip(" |")


def options(command: str) -> dict[str, Any]:
    """Return long name → option."""
    parameters = [each for each in GROUP.get_command(None, command).params if each.param_type_name == "option"]
    return {max(each.opts, key=len): each for each in parameters}


def default(option: Any) -> str:
    """Return the default as the page writes it, without its unit."""
    if isinstance(option.show_default, str):
        return option.show_default
    if option.is_flag:
        return "off"
    if option.default is None or option.required or option.multiple:
        return "–"
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def documented_options() -> dict[tuple[str, str], list[str]]:
    """Return (command, long name of an option) → its row."""
    rows = {}
    for row in table(PAGE, "option"):
        for command in cell(1, row).split(", "):
            for name in re.findall(r"`(--[\w-]+)`", row[0]):
                assert (command, name) not in rows
                rows[command, name] = row
    return rows


def test_every_option_has_a_row() -> None:
    in_program = set()
    for command in COMMANDS:
        for name, option in options(command).items():
            needs = command == "serve" and option.rich_help_panel == GATEWAY and name not in ("--gateway", "--insecure")
            needs |= command == "serve" and name == "--access-log"
            in_program.add((f"{command} with a gateway" if needs else command, name))
    assert set(documented_options()) == in_program


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_those_of_the_program(command: str) -> None:
    rows = {(of.removesuffix(" with a gateway"), name): row for (of, name), row in documented_options().items()}
    for name, option in options(command).items():
        written, expected = cell(2, rows[command, name]), default(option)
        assert written == expected or written.startswith(f"{expected} "), f"{command} {name}: {written}"


def test_every_variable_has_a_row() -> None:
    """Variables that the sources read, without those of benchmarks."""
    pattern = r"""environ(?:\.get\(|\[)["']([A-Z_]+)["']|^\w*_VARIABLE = ["'](\w+)["']"""
    read = set()
    for folder in ("gmmvit_deploy/serving", "gmmvit_deploy/runtimes/kernels", "gmmvit_deploy/serving/rollout", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            for match in re.finditer(pattern, path.read_text(encoding="utf-8"), re.MULTILINE):
                read.add(match[1] or match[2])
        for path in (ROOT / folder).rglob("*.c"):
            read.update(re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8")))
    assert "GMMVIT_CPU_ISA" in read
    assert len(read) >= 8
    read.update(_MEMORY)
    assert {*read, "TMPDIR"} == set(first_column(PAGE, "variable"))


def test_systemd_waits_longer_than_the_service_needs_to_end() -> None:
    """Rollout, gateway, front and two servers end one after the other."""
    text = (ROOT / "docs/pages" / PAGE).read_text(encoding="utf-8")
    longest = 30 + (_STOP_S + 3 * _END_S) + _EXIT_TIMEOUT_S + 2 * (ServerOptions().exit_timeout_s + _EXIT_S)
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > longest


def test_every_row_of_the_threats_names_tests_that_exist() -> None:
    rows = table(PAGE, "threat")
    assert len(rows) > 10
    for row in rows:
        assert len(row) == 5, row
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[4])
        assert named, row
        for file, test in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert file.startswith("benchmarks/") or re.search(rf"def {test}\(", text), f"{file}::{test}"


def noted_lines() -> Iterator[tuple[str, str]]:
    """(place, pattern) of every text that the service passes to its log."""
    for path in (*(ROOT / "gmmvit_deploy/serving").rglob("*.py"), ROOT / "gmmvit_deploy/serving/rollout/service.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)) and node.args:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                pattern = text_pattern(node.args[0])
                if name in ("note", "_note", "_log") and pattern:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", pattern


def text_pattern(node: ast.expr) -> str:
    """Return a regular expression for a string of the source; empty if the node is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.BinOp):
        return text_pattern(node.left) + ".*"
    if isinstance(node, ast.JoinedStr):
        return "".join(text_pattern(part) or ".+" for part in node.values)
    return ""


def test_every_line_of_the_log_has_a_row() -> None:
    documented = first_lines()
    patterns = list(noted_lines())
    assert len(patterns) >= 10
    for place, pattern in patterns:
        if pattern.startswith(".+Z"):  # the time and the name of the program before each line
            continue
        assert any(re.fullmatch(pattern, line) for line in documented), f"{place}: {pattern}"


def first_lines() -> list[str]:
    return [re.findall(r"`([^`]+)`", row[0])[0] for row in table(PAGE, "line")]


def test_every_documented_line_is_a_line_of_the_program() -> None:
    patterns = [pattern for _, pattern in noted_lines()]
    for line in first_lines():
        assert any(re.fullmatch(pattern, line) for pattern in patterns), line


def test_reasons_of_restarts_are_those_of_the_program() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "gmmvit_deploy/serving" / name for name in ("supervisor.py", "health.py", "server.py"))
    )
    for words in ("has ended", "probes in sequence", "the restart failed: ", "the Triton server "):
        assert words in sources
        assert any(words in line for line in first_lines())
