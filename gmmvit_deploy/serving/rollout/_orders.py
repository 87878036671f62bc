"""The orders to a service with a state folder, which serves the bundles that were promoted last.

gmmvit serve BUNDLE… --gateway --state DIR     starts the service
gmmvit rollout NEW --to DIR [--name NAME]      gives it an order
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import GmmvitError, InputError, ServerError
from gmmvit_deploy.runtimes.programs.memory import release_memory
from gmmvit_deploy.serving._metric_text import metric_text
from gmmvit_deploy.serving.rollout._blue_green import BlueGreen
from gmmvit_deploy.serving.rollout._rollout import RolloutOptions, roll_out, served_name
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.rollout.control import ControlServer, Send

_ABORT_S = 30.0
"""The maximum time in which a rollout that is aborted ends."""


def first_bundles(state: State, given: Mapping[str, Bundle]) -> dict[str, Bundle]:
    """Return the bundles with which the service starts: those that were promoted last, else ``given``, copied.

    Errors: InputError when the folder is new and ``given`` is empty, or when others than ``given`` were promoted.
    """
    promoted = state.promoted_bundles()
    if promoted and given:
        _require_promoted(state, promoted, given)
    if promoted:
        return promoted
    if not given:
        raise InputError(
            f"{state.folder}: expected a bundle, because no bundle was promoted in this state folder",
            hint=f"type gmmvit serve BUNDLE --gateway --keys FILE --state {state.folder}",
        )
    return {name: state.copy_of(name, bundle) for name, bundle in given.items()}


def _require_promoted(state: State, promoted: Mapping[str, Bundle], given: Mapping[str, Bundle]) -> None:
    start = f"type gmmvit serve --gateway --keys FILE --state {state.folder} without a bundle"
    if given.keys() != promoted.keys():
        raise InputError(
            f"{state.folder}: the service has the models {', '.join(sorted(promoted))}, not {', '.join(sorted(given))}",
            hint=f"{start}, or serve other models with a new state folder",
        )
    for name, bundle in given.items():
        if bundle.sha256 != promoted[name].sha256:
            option = f" --name {name}" if len(promoted) > 1 else ""
            raise InputError(
                f"{bundle.path}: the service in {state.folder} serves bundle {promoted[name].sha256[:12]}, not this "
                f"bundle ({bundle.sha256[:12]})",
                hint=f"{start}, then gmmvit rollout {bundle.path} --to {state.folder}{option}",
            )


class Orders:
    """Takes the orders for a running service, and carries out one rollout at a time in a thread of its own.

    The thread lives as long as the process, because Linux ends a server with the thread that started it, and the
    service completes its requests after the end of this object.
    """

    def __init__(self, servers: BlueGreen, state: State, *, on_log_line: Callable[[str], None] | None = None) -> None:
        self._servers, self._state = servers, state
        self._log = on_log_line or (lambda line: None)
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._busy = threading.Lock()
        self._order: _Order | None = None
        self._step = ""
        self._ended = {"promoted": 0, "failed": 0, "refused": 0}
        self._thread = threading.Thread(target=self._work, name="gmmvit-rollouts", daemon=True)
        self._closing = ExitStack()

    def __enter__(self) -> Orders:
        self._thread.start()
        handlers = {"rollout": self._rollout, "abort": self._abort, "status": self._status}
        self._closing.enter_context(ControlServer(self._state, handlers))
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        if (order := self._order) is not None:
            order.aborted.set()
            order.ended.wait(_ABORT_S)

    def metrics_text(self) -> str:
        """Return the state of the rollouts, in Prometheus's text format."""
        ended = [(f'{{result="{result}"}}', count) for result, count in self._ended.items()]
        running = [("", int(self._busy.locked()))]
        return metric_text("gmmvit_rollout_running", "gauge", "1 while a rollout is running", running) + metric_text(
            "gmmvit_rollouts_total", "counter", "Orders for rollouts by result; an abort is a failure", ended
        )

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            order.carry_out(self._servers, self._state, self._report(order))
            self._step = ""
            release_memory()  # of the bundles and of the threads of this rollout, or each adds about 10 MiB

    def _report(self, order: _Order) -> Callable[[str], None]:
        def report(step: str) -> None:
            self._step, order.started = step, True
            self._log(f"rollout{self._as(order.name)}: {step}")
            order.send({"step": step})

        return report

    def _rollout(self, data: dict[str, Any], send: Send) -> Mapping[str, Any]:
        order = _Order(data, send, self._servers.served)
        if not self._busy.acquire(blocking=False):
            raise ServerError(
                f"another rollout is running: {self._step}",
                hint=f"wait, or type gmmvit rollout --abort --to {self._state.folder}",
            )
        try:
            self._order = order
            self._orders.put(order)
            order.ended.wait()
        finally:
            self._order = None
            self._busy.release()
        result = "promoted" if order.error is None else "failed" if order.started else "refused"
        self._ended[result] += 1
        if order.error is not None:
            self._log(f"rollout{self._as(order.name)}: {result}: {order.error}")
            raise order.error
        done = f"the service serves bundle {order.served}{self._as(order.name)}"
        return {"done": done, "name": order.name, "bundle": order.served}

    def _abort(self, data: dict[str, Any], send: Send) -> Mapping[str, Any]:
        order = self._order
        if order is None:
            raise InputError(
                f"{self._state.folder}: no rollout is running",
                hint=f"type gmmvit rollout --status --to {self._state.folder} to see which bundle is served",
            )
        order.aborted.set()
        order.ended.wait()
        served = f"bundle {self._servers.served[order.name].sha256[:12]}{self._as(order.name)}"
        if order.error is None:
            option = f" --name {order.name}" if len(self._servers.served) > 1 else ""
            raise ServerError(
                f"too late: the rollout has promoted {served}",
                hint=f"type gmmvit rollout {self._before(order.name)} --to {self._state.folder}{option} to go back",
            )
        return {"done": f"the rollout has ended; the service goes on with {served}"}

    def _status(self, data: dict[str, Any], send: Send) -> Mapping[str, Any]:
        models, lines = [], []
        for name, bundle in sorted(self._servers.served.items()):
            before = self._before(name)
            models.append(
                {
                    "name": name,
                    "bundle": bundle.sha256,
                    "before": before.name if before else "",
                    "before_path": str(before) if before else "",
                }
            )
            previous = f"; the previous bundle is {before}" if before else ""
            lines.append(f"serves bundle {bundle.sha256[:12]}{self._as(name)}{previous}")
        if self._step:
            lines.append(f"rollout{self._as(self._order.name) if self._order else ''}: {self._step}")
        alone = models[0] if len(models) == 1 else {}
        return {"done": "\n".join(lines), "status": {**alone, "step": self._step, "models": models}}

    def _before(self, name: str) -> Path | None:
        """Return the path of the bundle before the promoted bundle of a model, or None after the first bundle."""
        promoted = self._state.promoted().get(name)
        return self._state.path_of(name, promoted.before).absolute() if promoted and promoted.before else None

    def _as(self, name: str) -> str:
        """Return what a sentence about the bundle of a model adds in a service of several models."""
        return f" as {name}" if len(self._servers.served) > 1 else ""


class _Order:
    """A rollout that waits for the worker thread, or is carried out by it."""

    def __init__(self, data: Mapping[str, Any], send: Send, served: Collection[str]) -> None:
        """served: the names of the service's models.  Errors: InputError when a value is missing or invalid."""
        self.send = send
        self.ended = threading.Event()
        self.started = False
        """False if the order was refused before its first step."""
        self.aborted = threading.Event()
        self.error: GmmvitError | None = None
        self.served = ""
        try:
            self.name = served_name(data["name"], served)
            self._bundle = Path(data["bundle"])
            self._options = RolloutOptions(
                images=[Path(path) for path in data["images"]],
                agreement=float(data["agreement"]),
                allow_contract_change=bool(data["allow_contract_change"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(
                f"the order of the rollout lacks a value, or has an invalid value: {exc}",
                hint="type gmmvit rollout with the same version of gmmvit as gmmvit serve",
            ) from exc

    def carry_out(self, servers: BlueGreen, state: State, report: Callable[[str], None]) -> None:
        try:
            aborted = self.aborted.is_set
            bundle = roll_out(self.name, self._bundle, servers, state, self._options, report=report, aborted=aborted)
            self.served = bundle.sha256
        except GmmvitError as exc:
            self.error = exc
        except Exception as exc:  # the service goes on with the old server, and the client learns what happened
            self.error = ServerError(f"the rollout failed: {type(exc).__name__}: {exc}", hint="see the service's log")
        finally:
            self.ended.set()
