"""What help shows: every command under its job, each option under its subject, names of the code, nothing cut off."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from gmmvit_cli.commands import JOBS, SUMMARIES
from gmmvit_cli.main import app
from gmmvit_cli.panels import GENERAL
from gmmvit_deploy.models.families import PRESETS
from gmmvit_deploy.models.sources.hints import SETTINGS
from tests.cli.terminal import done, gmmvit_here

WIDTH = 80
GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {name: GROUP.get_command(None, name) for name in SUMMARIES}


def words(text: str) -> str:
    return " ".join(text.split())


def test_help_lists_commands_by_job_a_line_each() -> None:
    answer = gmmvit_here("--help", columns=WIDTH)
    assert answer.status == 0
    lines = answer.out.splitlines()
    assert [line.rstrip(":") for line in lines if line.rstrip(":") in JOBS] == list(JOBS)
    for job, names in JOBS.items():
        start = lines.index(f"{job}:") + 1
        listed = [line.split(maxsplit=1) for line in lines[start : start + len(names)]]
        assert listed == [[name, summary] for name, summary in names.items()]
    assert max(map(len, lines)) <= WIDTH


def test_gmmvit_alone_shows_what_to_do_first() -> None:
    answer = gmmvit_here()
    assert answer.status == 0
    for step in ("gmmvit demo", "gmmvit export", "gmmvit parity", "gmmvit serve", "gmmvit --help"):
        assert step in answer.out
    assert len(answer.out.splitlines()) < 15


@pytest.mark.parametrize("name", SUMMARIES)
class TestEveryCommand:
    def test_fits_in_80_columns(self, name: str) -> None:
        lines = gmmvit_here(name, "--help", columns=WIDTH).out.splitlines()
        assert max(map(len, lines)) <= WIDTH
        assert not [line for line in lines[1:] if line.rstrip().endswith(("...", "…"))]
        assert SUMMARIES[name] in lines[2]

    def test_groups_its_options_by_subject(self, name: str) -> None:
        text = gmmvit_here(name, "--help").out
        for param in COMMANDS[name].params:
            assert param.rich_help_panel, param.name
            assert param.help, param.name
            assert words(param.help) in words(text), param.name
            assert all(option in text for option in param.opts if option.startswith("-"))
        headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
        assert "\x1b" not in text  # the same with a terminal of colours
        assert {"--json", "--quiet", "--verbose"} <= {option for p in COMMANDS[name].params for option in p.opts}
        assert (headings[0], headings[-1]) == ("Example:", f"{GENERAL.title}:")
        assert len(headings) >= 3

    def test_examples_can_be_typed(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for folder in ("bundle", "model_repository"):
            (tmp_path / folder).mkdir()
        for name_of_file in ("photo.jpg", "keys.txt", "cert.pem", "model_repository/gmmvit_tuning.json"):
            (tmp_path / name_of_file).touch()
        monkeypatch.chdir(tmp_path)
        lines = import_module(f"gmmvit_cli.{name}").EXAMPLE.splitlines()
        assert lines
        for line in (line for line in lines if not line.startswith("# ")):
            assert len(line) <= WIDTH * 2
            gmmvit, command, *arguments = shlex.split(line)
            assert (gmmvit, command) == ("gmmvit", name)
            arguments += ["--force"] * any(param.name == "out" for param in COMMANDS[name].params)  # bundle exists
            COMMANDS[name].make_context(name, arguments)


def test_export_shows_the_ways_in_before_its_options_and_lists_only_when_asked() -> None:
    text = gmmvit_here("export", "--help", columns=WIDTH).out
    ways = [text.index(name) for name in ("your own training", "# timm", "# Hugging Face")]
    assert [*ways, text.index("\nInput:")] == sorted([*ways, text.index("\nInput:")])
    assert len(text.splitlines()) < 150
    for option, names in (("--set", SETTINGS), ("--preset", PRESETS)):
        listed = done(gmmvit_here("export", option, "help")).out
        assert all(name in listed for name in names)
        assert sum(name in text for name in names) < len(names) / 2


_IMPORTS = """
import sys
import typer, rich
from rich import console, table
bare = len(sys.modules)
from gmmvit_cli.commands import SUMMARIES
from gmmvit_cli.main import main

def run(*arguments):
    sys.argv = ["gmmvit", *arguments]
    try:
        main()
    except SystemExit:
        pass

run("--help")
print("modules", bare, len(sys.modules), [name for name in SUMMARIES if f"gmmvit_cli.{name}" in sys.modules])
run()
run("--version")
for name in SUMMARIES:
    for module in [module for module in sys.modules if module.startswith("gmmvit_cli.")]:
        del sys.modules[module]
    from gmmvit_cli.main import main
    run(name, "--help")
    run(name, "--no-such-option")
    print("commands", name, *[other for other in SUMMARIES if f"gmmvit_cli.{other}" in sys.modules])
heavy = {"torch", "numpy", "onnx", "onnxruntime", "openvino", "tritonclient", "PIL", "matplotlib", "pygments"}
print("heavy", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.integration
def test_help_imports_nothing_that_it_does_not_use() -> None:
    """Modules are counted, because a count does not depend on how busy the machine is."""
    answer = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    (modules,) = (line.split(maxsplit=3) for line in lines if line.startswith("modules "))
    assert int(modules[2]) <= 2 * int(modules[1])
    assert modules[3] == "[]"
    assert "heavy []" in lines
    imported = {line.split()[1]: set(line.split()[2:]) for line in lines if line.startswith("commands ")}
    assert list(imported) == list(SUMMARIES)
    shared = {"export": {"convert"}, "serve": {"gateway"}}  # the other precisions; the options of the gateway
    for name, others in imported.items():
        assert others == {name} | shared.get(name, set())


_COMMANDS = """
import sys
from gmmvit_cli.main import main

for words in sys.argv[1:]:
    sys.argv = ["gmmvit", *words.split()]
    try:
        main()
    except SystemExit:
        pass
    print(words.split()[0], *sorted({"torch", "onnxruntime", "openvino", "matplotlib"} & set(sys.modules)))
"""


@pytest.mark.integration
def test_an_input_that_is_missing_is_refused_without_loading_pytorch(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text("{}")
    commands = (
        "export nowhere -o new --dataset cifar10",
        "inspect nowhere",
        "convert nowhere --precision fp16",
        "build nowhere",
        "parity nowhere",
        "optimize nowhere --data digits",
        "bench nowhere --synthetic",
        f"bench --compare {result} {result}",
        "repository nowhere",
        "serve nowhere",
        "gateway nowhere",
        f"manifests nowhere --image i@sha256:{'0' * 64} --model-uri pvc://claim",
        "pack nowhere",
        "rollout nowhere --to nowhere",
        "classify nowhere",
        "tune nowhere --bound-ms 1",
        "doctor nowhere",
        "demo -o .",
        "train -o . --data digits --preset vit",
    )
    assert {words.split()[0] for words in commands} == set(SUMMARIES)
    answer = subprocess.run(
        [sys.executable, "-c", _COMMANDS, *commands], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert answer.stderr.count("Error: ") == len(commands), answer.stderr
    assert answer.stdout.splitlines() == [words.split()[0] for words in commands]


# ---- completion in a shell -------------------------------------------------------------------------------------------


def completions(command: str, option: str, incomplete: str = "") -> list[str]:
    (param,) = (param for param in COMMANDS[command].params if option in param.opts)
    context: Any = COMMANDS[command].make_context(command, [], resilient_parsing=True)
    return [item.value for item in param.shell_complete(context, incomplete)]


def test_lists_go_on_after_a_comma() -> None:
    assert completions("parity", "--runner", "eager,onn") == [
        f"eager,onnxruntime{rest}" for rest in ("", "-cuda", "-tensorrt")
    ]
    assert "eager,eager" not in completions("parity", "--runner", "eager,")
    assert completions("export", "--precision", "fp1") == ["fp16"]


_BASH = """
eval "$(_GMMVIT_COMPLETE=source_bash gmmvit)"
complete_line() {
    read -ra COMP_WORDS <<< "$1"; [[ "$1" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    _gmmvit_completion gmmvit
    echo "${COMPREPLY[*]}"
}
complete_line "gmmvit "
complete_line "gmmvit par"
complete_line "gmmvit parity bundle --runner openvino"
complete_line "gmmvit export "
complete -p gmmvit
"""


@pytest.mark.nightly
@pytest.mark.integration
def test_in_bash(tmp_path: Path) -> None:
    program = tmp_path / "gmmvit"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gmmvit_cli.main "$@"\n')
    program.chmod(0o755)
    command = ["bash", "--norc", "-c", f"PATH={tmp_path}:$PATH\n{_BASH}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    everything, matching, runners, files, registered = answer.stdout.splitlines()
    assert everything.split() == list(SUMMARIES)
    assert matching == "parity"
    assert runners.split() == ["openvino", "openvino+kernels"]
    assert files == ""
    assert "-o default" in registered  # where nothing is offered, bash completes files and folders
    assert answer.stderr == ""
