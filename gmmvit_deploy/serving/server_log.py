"""The log of a server: keep the last lines, pass each line on, and name the causes of a failed start."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from gmmvit_deploy.errors import OutputError

_LINES_KEPT = 2000
_COMPLETED = "All models are stopped, unloading models"
_NO_GPU = re.compile("CUDA driver version is insufficient|no CUDA-capable device")


class ServerLog:
    """The lines of a server's output, and the lines that this package adds."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        """on_line: called with each line."""
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self.requests_completed = False
        """True after a signal to stop, when the server has completed every inference that it had accepted."""
        self._no_gpu = False
        self._file: TextIO | None = None
        self._on_line = on_line

    def open(self, path: Path | None) -> None:
        """Append the lines to a file from now on; None writes no file.

        Errors: OutputError when the file cannot be opened.
        """
        if path is None:
            return
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as exc:
            raise OutputError(
                f"{path}: cannot open this file for the server's log: {exc.strerror}",
                hint="type --log with a file in a folder that exists and that this user can write",
            ) from exc

    def read(self, output: Iterable[str]) -> None:
        """Add the server's output up to its end, because the server would block on a full pipe."""
        for line in output:
            self.add(line.rstrip("\n"))

    def add(self, line: str) -> None:
        self._lines.append(line)
        self.requests_completed |= _COMPLETED in line
        if self._on_line is not None:
            try:
                self._on_line(line)
            except (OSError, ValueError):  # it prints to a closed pipe
                self._on_line = None
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):  # the disk is full, or the log is closed
                self._file.write(line + "\n")
        if _NO_GPU.search(line) and not self._no_gpu:
            self._no_gpu = True
            self.note("Triton sees no GPU and runs on the CPU: its lines about CUDA, NVML and DCGM are no errors")

    def note(self, text: str) -> None:
        """Add a line of this package, with the time in UTC as in Triton's lines."""
        self.add(stamped(text))

    def forget(self) -> None:
        """Forget the lines that are kept, before another process writes to this log."""
        self._lines.clear()
        self.requests_completed = False

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def last_words(self) -> str:
        last = next((line.strip() for line in reversed(self._lines) if line.strip()), "")
        return f"the last line of the server's log: {last}" if last else "the server's log is empty"

    def not_loaded(self) -> dict[str, str]:
        """Return model → why the server could not load it."""
        text = "\n".join(self._lines)
        failed = re.findall(r"failed to load '([^']+)' version \d+: (.*?)(?=\n[A-Z]\d{4} |\n\+|\Z)", text, re.DOTALL)
        return {model: _one_line(why) for model, why in failed}

    def causes(self) -> list[str]:
        """Return up to five reasons why the server ended, without log prefixes and line breaks."""
        text = "\n".join(self._lines)
        causes = [f"{model}: {why}" for model, why in self.not_loaded().items()]
        causes += [_one_line(why) for why in re.findall(r"^error: (.*)$", text, re.MULTILINE)]
        causes += [_one_line(why) for why in re.findall(r"(failed to start \w+ service: .*)", text, re.IGNORECASE)]
        return list(dict.fromkeys(causes))[:5]


def stamped(text: str) -> str:
    """Return a line of the log: the time in UTC as in Triton's lines, the name of the command, and the text."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} gmmvit serve: {text}"


def _one_line(text: str) -> str:
    return " ".join(text.replace("\\n", " ").split())[:400].strip(' "')
