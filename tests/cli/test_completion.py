"""Shell completion: commands, options, the names of the code, and files where a file is expected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gmmvit_cli.commands import SUMMARIES
from tests.cli.test_help import COMMANDS


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
