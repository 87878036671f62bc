"""Progress: a bar on a terminal, single lines elsewhere, nothing with --quiet, every step with --verbose."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from gmmvit_cli import output
from gmmvit_cli import progress as module
from gmmvit_cli.output import note, set_verbosity
from gmmvit_cli.progress import LINE_MARK, Lines, progress
from gmmvit_deploy.progress import Progress, ignore


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _normal() -> Iterator[None]:
    yield
    set_verbosity("normal")


def test_long_work_prints_lines_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines("bench", clock=clock)
    for step in range(100):
        lines(Progress("round 1", step, 100, "loss 0.5"))
        clock.now += 1.0
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == f"{LINE_MARK} bench: round 1, loss 0.5 (1 of 100 done, about 2 min left)"
    assert printed[-1] == f"{LINE_MARK} bench: round 1, loss 0.5 (94 of 100 done, about 6 s left)"
    assert len(printed) == 15  # the longer it lasts, the rarer: an hour prints a line a minute


def test_verbose_prints_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    set_verbosity("verbose")
    with progress("export") as on_progress:
        for step in ("read", "fold", "fold", "prove"):
            on_progress(Progress(step))
    assert capsys.readouterr().err == "".join(f"{LINE_MARK} export: {step}\n" for step in ("read", "fold", "prove"))


def test_verbose_shows_the_logs_of_libraries_and_the_next_command_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    for verbosity, shown in (("verbose", True), ("normal", False), ("quiet", False)):
        set_verbosity(verbosity)  # type: ignore[arg-type]
        logging.getLogger("some.library").info("an intermediate step")
        assert ("some.library: an intermediate step" in capsys.readouterr().err) == shown


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    set_verbosity("quiet")
    with progress("export") as on_progress:
        assert on_progress is ignore
        note("a note")
    assert capsys.readouterr().err == ""
    output.print_error("Error: still printed")
    assert capsys.readouterr().err == "Error: still printed\n"


def test_a_terminal_shows_a_bar_with_the_time_left() -> None:
    screen, clock = io.StringIO(), Clock()
    console = Console(file=screen, force_terminal=True, width=100)
    with module._bar("bench", console, clock) as on_progress:
        on_progress(Progress("prepare"))
        for done in range(4):
            clock.now += 2.0
            on_progress(Progress("round [1]", done, 10))
    text = screen.getvalue()
    assert "bench: round [1]" in text  # not taken for markup
    assert "3 of 10, about 14 s left" in text
