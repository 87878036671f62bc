"""Count SIGINT and SIGTERM: the first ends a command, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

__all__ = ["Signals"]


class Signals:
    """Counts SIGINT and SIGTERM inside ``with Signals(on_second=…) as signals:``; use it in the main thread.

    on_second: called by the signal handler at the second signal and each further signal.
    """

    def __init__(self, *, on_second: Callable[[], None]) -> None:
        self.seen = 0
        self._on_second = on_second
        self._before: dict[signal.Signals, object] = {}

    def any_seen(self) -> bool:
        return self.seen > 0

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # the handler that signal() returned

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.seen += 1
        if self.seen > 1:
            self._on_second()
