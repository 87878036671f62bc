"""Send hostile inputs to a service one after the other, and attribute the end of a process to the right input.

A server can end some seconds after its answer, so each of the last inputs is sent alone to a fresh service; an input
that ends that alone is a crash.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hostile_service.senders import send_call, send_held, send_images, send_requests, sound
from benchmarks.hostile_service.service import LIMIT_S, Service
from tests.hostile.case import ANSWERED, CLOSED, CRASH, FAILED, HANG, REFUSED, Case, Outcome
from tests.hostile.commands import Sandbox
from tests.hostile.http_requests import Held
from tests.hostile.images import bomb

PATIENCE = 4
"""An input without an answer is sent again with a time limit so many times as long: other programs can use the machine.
An input hangs if it gets no answer twice."""

_HARM = (CRASH, HANG, ANSWERED, CLOSED, FAILED, REFUSED)
_SUSPECTS = 4
"""The number of inputs that are repeated alone after a process has ended."""
_SETTLE_S = 5.0
_IDLE_S, _REST_S = 5.0, 30.0
"""The time without requests before memory is read, and the longest time until it is back where it was."""


def recorded(case: Case, outcome: Outcome, **more: Any) -> dict[str, Any]:
    """Return the record of an input.  ``key=False`` and not ``public``: only a refusal is right."""
    refused_only = more.get("key") is False and not more.get("public")
    allowed = outcome.answer != ANSWERED or (case.may_be_answered and not refused_only)
    return {
        "kind": case.kind,
        "name": case.name,
        "answer": outcome.answer,
        "right": outcome.answer not in (CRASH, HANG) and allowed,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 2),
        **more,
    }


def worst_of(outcomes: list[Outcome]) -> Outcome:
    """Return the most harmful outcome."""
    return min(outcomes, key=lambda outcome: _HARM.index(outcome.answer))


@dataclass(frozen=True, slots=True)
class _Asked:
    case: Case
    key: bool
    record: dict[str, Any]


@dataclass(slots=True)
class Asker:
    """Sends inputs to a running service.

    memory: MB of the processes before and after each round, and restarts.  ended_together: the last inputs before an
    end that none of them causes alone.
    """

    service: Service
    sandbox: Sandbox
    memory: dict[str, Any] = field(default_factory=dict)
    ended_together: list[list[str]] = field(default_factory=list)
    _recent: deque[_Asked] = field(default_factory=lambda: deque(maxlen=_SUSPECTS))
    _cleared: set[tuple[str, str, bool]] = field(default_factory=set)
    _servers: set[int] = field(default_factory=set)
    _files: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Send sound requests, also large images, so that the memory before is that of a service in use."""
        deadline = time.monotonic() + 60
        while not sound(self.service) and time.monotonic() < deadline:
            time.sleep(0.2)
        send_images(self.service, [bomb()] * 2, key=True)
        time.sleep(_IDLE_S)
        self.memory.update(before_mb=self.service.memory_mb(), rounds=[])
        self._files, self._servers = self.sandbox.files(), self.service.servers()

    def end_round(self) -> None:
        """Record the memory after all inputs, when the service had time without requests."""
        time.sleep(_IDLE_S)
        before = sum(self.memory["before_mb"].values())
        _until(lambda: sum(self.service.memory_mb().values()) <= before, _REST_S)
        self.memory["rounds"].append(self.service.memory_mb())

    def ask(self, case: Case, *, key: bool) -> dict[str, Any]:
        """Send an input, and then a sound request to the same processes; return the record of the input."""
        outcomes, public = _sent(self.service, case, key=key)
        worst = worst_of(list(outcomes.values()))
        if worst.answer == HANG:
            self.service.limit_s = LIMIT_S * PATIENCE
            outcomes, public = _sent(self.service, case, key=key)
            self.service.limit_s = LIMIT_S
            worst = worst_of(list(outcomes.values()))
        answers = _until(lambda: sound(self.service), LIMIT_S * PATIENCE)
        alive = self._servers <= self.service.servers()
        if alive and not answers and worst.answer != HANG:
            worst = Outcome(HANG, f"a sound request was not answered afterwards; {worst.reason}", worst.seconds)
        record = recorded(
            case,
            worst,
            key=key if self.service.key else None,
            public=public,
            memory_mb=sum(self.service.memory_mb().values()),
            wrote=self._written(),
            answers={way: outcome.answer for way, outcome in outcomes.items()},
        )
        self._recent.append(_Asked(case, key, record))
        if not alive:
            self._attribute()
        return record

    def _written(self) -> list[str]:
        """Return the names of the new files, without the folder that a server has made after a restart."""
        files = self.sandbox.files()
        new, self._files = files - self._files, files
        own = {name for name in new if Path(name).name.startswith("gmmvit-run-serve-")}
        return sorted(Path(name).name for name in new if not any(Path(name).is_relative_to(folder) for folder in own))

    def _attribute(self) -> None:
        """Send each of the last inputs alone to a fresh service; mark those that end it, and restart the service."""
        ends = [asked for asked in reversed(self._recent) if self._ends(asked.case, key=asked.key)]
        for asked in ends:
            reason = f"the service ended, also after this input alone; answer: {asked.record['answer']}"
            asked.record.update(answer=CRASH, right=False, reason=f"{reason} {asked.record['reason']}")
        if not ends:
            self.ended_together.append([f"{asked.case.kind}: {asked.case.name}" for asked in self._recent])
        self._recent.clear()
        self.service.restart()
        self.memory["restarts"] = self.memory.get("restarts", 0) + 1
        self.begin()

    def _ends(self, case: Case, *, key: bool) -> bool:
        """Return whether an input alone ends a fresh service, at once or within some seconds."""
        name = (case.kind, case.name, key)
        if name in self._cleared:
            return False
        self.service.restart()
        _until(lambda: sound(self.service), 60)
        servers = self.service.servers()
        _sent(self.service, case, key=key)
        ended = _until(lambda: not servers <= self.service.servers(), _SETTLE_S)
        if not ended:
            self._cleared.add(name)
        return ended


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _sent(service: Service, case: Case, *, key: bool) -> tuple[dict[str, Outcome], bool]:
    """Send an input; return name of the way → outcome, and whether an answer needs no key."""
    made = case.make()
    if case.kind == "image":
        return send_images(service, made, key=key), False
    if isinstance(made, Held):
        return {case.kind: send_held(service, made, key=key)}, True
    if isinstance(made, list):
        public = all(request.path.startswith("/v2/health/") for request in made)
        return {case.kind: send_requests(service, made, key=key)}, public
    return {"grpc": send_call(service, made, key=key)}, False
