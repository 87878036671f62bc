"""Progress of long work: the event type and the callback of all long-running functions.

def long_work(..., *, on_progress: OnProgress = ignore) -> Result:
    on_progress(Progress("fold the masks", done=1, total=4))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["OnProgress", "Progress", "detailed", "ignore", "prefixed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Event: a step begins or advances.

    step: description in a few words.  done: number of finished units.  total: number of units, of the step or of the
    whole work, or None if unknown.  detail: an additional value to show, such as a loss.
    """

    step: str
    done: int = 0
    total: int | None = None
    detail: str = ""


OnProgress = Callable[[Progress], None]


def ignore(event: Progress) -> None:
    """Do nothing.  Default of every ``on_progress``."""


def prefixed(prefix: str, on_progress: OnProgress) -> OnProgress:
    """Return a callback that puts ``prefix: `` before the step of every event."""
    return lambda event: on_progress(replace(event, step=f"{prefix}: {event.step}"))


def detailed(step: Progress, on_progress: OnProgress) -> OnProgress:
    """Return a callback for the work within ``step``, whose steps appear as the detail of ``step``."""
    return lambda event: on_progress(replace(step, detail=event.step))
