"""Progress of long work: one event and one callback for everything that takes longer than a moment.

def long_work(..., *, on_progress: OnProgress = ignore) -> Result:
    on_progress(Progress("fold the masks", done=1, total=4))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["OnProgress", "Progress", "detailed", "ignore", "prefixed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """A step begins, or advances.

    step: what is being done, in a few words.  done: units that are finished.  total: units in all, of the step or of
    the whole work, or None where the number is not known.  detail: a value worth showing besides, such as a loss.
    """

    step: str
    done: int = 0
    total: int | None = None
    detail: str = ""


OnProgress = Callable[[Progress], None]


def ignore(event: Progress) -> None:
    """The default of every ``on_progress``: does nothing."""


def prefixed(prefix: str, on_progress: OnProgress) -> OnProgress:
    """A callback that puts ``prefix: `` before the step of every event."""
    return lambda event: on_progress(replace(event, step=f"{prefix}: {event.step}"))


def detailed(step: Progress, on_progress: OnProgress) -> OnProgress:
    """A callback for the work within ``step``: its steps are shown as the detail of ``step``."""
    return lambda event: on_progress(replace(step, detail=event.step))
