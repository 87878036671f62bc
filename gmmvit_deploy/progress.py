"""Report the progress of long-running functions: the type of an event, and the callback that receives the events.

A long-running function has the parameter ``on_progress`` and reports progress as in this example:

def long_work(..., *, on_progress: OnProgress = ignore) -> Result:
    on_progress(Progress("fold the masks", done=1, total=4))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Progress:
    """The event that a step begins or advances.

    step: the name of the step in a few words.  done: the number of finished units.
    total: the number of all units; None if unknown.  Units are counted for the step or for the whole work.
    detail: additional text to show, such as the loss in training.
    """

    step: str
    done: int = 0
    total: int | None = None
    detail: str = ""


OnProgress = Callable[[Progress], None]


def ignore(event: Progress) -> None:
    """Ignore the event; the default of every ``on_progress``."""


def prefixed(prefix: str, on_progress: OnProgress) -> OnProgress:
    """Return a callback that puts ``prefix: `` before the step of every event."""
    return lambda event: on_progress(replace(event, step=f"{prefix}: {event.step}"))


def detailed(step: Progress, on_progress: OnProgress) -> OnProgress:
    """Return a callback for a function that is a part of ``step``: steps of the function become the step's detail."""
    return lambda event: on_progress(replace(step, detail=event.step))
