"""Mistakes in the options of a rollout and of a state folder: refused, with what to type."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.rollout._rollout import RolloutOptions
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.rollout.control import ControlServer, Send
from tests.cli.terminal import gmmvit_here

pytestmark = pytest.mark.nightly


def test_percent_of_agreement_gets_a_share_to_type() -> None:
    with pytest.raises(InputError, match="--agreement: expected a share from 0 to 1, got 95") as caught:
        RolloutOptions(agreement=95.0)
    assert caught.value.hint == "type --agreement 0.95"


@pytest.mark.parametrize("name", ["manifest.json", "photo.png"])
def test_a_folder_of_something_else_stays_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    named = "a bundle" if name == "manifest.json" else r"a folder with other files \(photo\.png\)"
    with pytest.raises(InputError, match=named), State(tmp_path).locked():
        pytest.fail("the folder was taken")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    answer = gmmvit_here("rollout", "--status", "--to", tmp_path)
    assert answer.status == 1
    assert re.search(f"Error: --to .*: expected the state folder of a service, got {named}\n", answer.err)


def test_the_folder_of_a_service_is_taken(tmp_path: Path) -> None:
    for name in ("lock", "control", ".promoted.json.partial-ab"):
        (tmp_path / name).write_text("")
    with State(tmp_path).locked():
        pass
    for name in ("promoted.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    with State(tmp_path).locked():
        pass


@pytest.mark.integration
def test_an_interrupted_command_states_how_to_end_the_rollout(tmp_path: Path, bundle: Bundle) -> None:
    ended = threading.Event()

    def begin(order: dict[str, Any], send: Send) -> Mapping[str, Any]:
        send({"step": "begins"})
        ended.wait(60)
        return {"done": "rolled out"}

    command = [sys.executable, "-m", "gmmvit_cli.main", "rollout", str(bundle.path), "--to", str(tmp_path)]
    with ControlServer(State(tmp_path), {"rollout": begin}):
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        for process, number, status in zip(processes, (signal.SIGINT, signal.SIGTERM), (130, 143), strict=True):
            with process:
                assert process.stderr is not None
                assert process.stderr.readline() == "begins\n"
                process.send_signal(number)
                assert process.wait(30) == status
                words = f"the rollout goes on; type gmmvit rollout --abort --to {tmp_path} to end it"
                assert words in process.stderr.read()
        ended.set()
