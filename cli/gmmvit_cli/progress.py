"""Progress of a command on stderr: a bar with the time left on a terminal, single lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gmmvit_cli.output import note, verbosity
from gmmvit_deploy.progress import OnProgress, Progress, ignore

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

LINE_MARK = "·"
"""First character of every progress line, so that a reader of stderr can tell it from an error."""
_QUIET_S = 1.0  # work that ends sooner prints no line
_BETWEEN_S, _MAX_BETWEEN_S = 2.0, 60.0  # minimum time between two lines, at first and later: no flood in a log
_BETWEEN_SHARE = 0.2  # of the time so far
_SILENT_S = 15.0  # maximum time without a line: a longer step is named again


@contextmanager
def progress(work: str) -> Iterator[OnProgress]:
    """Show the events of ``on_progress`` while the block runs.

    work: the command, which stands at the start of each line. With ``--quiet`` nothing is shown; with ``--verbose``
    every step is a line of its own.
    """
    if verbosity() == "quiet":
        yield ignore
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and verbosity() != "verbose":
        with _bar(work, console) as on_progress:
            yield on_progress
    else:
        with _beating(Lines(work, every_step=verbosity() == "verbose")) as lines:
            yield lines


@contextmanager
def _bar(work: str, console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Numbers(TextColumn):
        """A column such as ``3 of 12, about 8 s left``; a number that is not known is omitted."""

        def render(self, task: Task) -> Text:
            if task.total is None:
                return Text("")
            left = task.time_remaining
            time_left = f", about {_duration(left)} left" if left else ""
            return Text(f"{task.completed:.0f} of {task.total:.0f}{time_left}")

    description = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), Numbers(""), description)
    with Bars(*columns, console=console, transient=True, get_time=clock) as bars:
        task = bars.add_task(work, total=None)
        last = Progress(work)

        def on_progress(event: Progress) -> None:
            nonlocal last
            if event.total != last.total or event.done < last.done:
                # A new count begins: the speed of the count before does not apply to it.
                bars.reset(task, total=event.total)
            bars.update(task, description=_words(work, event), completed=event.done)
            last = event

        yield on_progress


@contextmanager
def _beating(lines: Lines) -> Iterator[Lines]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BETWEEN_S):
            lines.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()


class Lines:
    """Single lines for a pipe or a log file.

    every_step: print each step at once; otherwise only while the work lasts, and the rarer the longer it lasts.
    clock: seconds, for tests.
    """

    def __init__(self, work: str, *, every_step: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._every_step, self._clock = work, every_step, clock
        self._start = self._since = clock()
        self._printed_at: float | None = None
        self._printed = ""
        self._counted_from = 0
        self._last: Progress | None = None
        self._step_since = self._start

    def beat(self) -> None:
        """Name the step that runs, if it is not named yet, and again from time to time: a long step looks dead."""
        now, last = self._clock(), self._last
        if last is None or last.done == last.total or not self._is_time(now):
            return
        if last.step == self._printed and now - (self._printed_at or now) < _SILENT_S:
            return
        self._printed_at, self._printed = now, last.step
        numbers = self._numbers(now, last)
        note(f"{LINE_MARK} {_words(self._work, last)}{numbers}, for {_duration(now - self._step_since)} so far")

    def __call__(self, event: Progress) -> None:
        now, last = self._clock(), self._last
        if last is None or event.step != last.step:
            self._step_since = now
        if last is None or event.total != last.total or event.done < last.done:
            self._since, self._counted_from = now, event.done
        self._last = event
        if not self._due(now, event):
            return
        self._printed_at, self._printed = now, event.step
        note(f"{LINE_MARK} {_words(self._work, event)}{self._numbers(now, event)}")

    def _due(self, now: float, event: Progress) -> bool:
        if self._every_step and event.step != self._printed:
            return True
        return now - self._start >= _QUIET_S and self._is_time(now)

    def _is_time(self, now: float) -> bool:
        between = min(max(_BETWEEN_S, _BETWEEN_SHARE * (now - self._start)), _MAX_BETWEEN_S)
        return self._printed_at is None or now - self._printed_at >= between

    def _numbers(self, now: float, event: Progress) -> str:
        if event.total is None:
            return ""
        advanced, left = event.done - self._counted_from, event.total - event.done
        time_left = ""
        if advanced > 0 and left > 0:
            time_left = f", about {_duration((now - self._since) / advanced * left)} left"
        return f" ({event.done} of {event.total} done{time_left})"


def _words(work: str, event: Progress) -> str:
    return f"{work}: {event.step}{f', {event.detail}' if event.detail else ''}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
