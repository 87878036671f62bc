"""``gmmvit serve --gateway --state`` as a process of its own, and the orders that ``gmmvit rollout`` sends to it."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.rollout.control import send_order
from tests.serving.commands import Serve, kinds_of
from tests.serving.gateways import KEY, Answer, request
from tests.serving.rollout.checked_load import CheckedLoad
from tests.serving.threads import in_threads

ORDER: dict[str, Any] = {
    "order": "rollout",
    "name": None,
    "images": [],
    "agreement": 0.95,
    "allow_contract_change": False,
}
"""An order for a rollout, without its bundle."""
_STOP_S = 60.0


class StateService:
    """A running service; it ends with ``with StateService(…) as service:``.

    state: the state folder, ``service`` in the folder of the service; ``service.log`` and ``access.log`` lie beside it.
    where: what the command prints, such as the addresses ``http`` and ``grpc``.
    """

    def __init__(self, folder: Path, keys: Path, *arguments: str) -> None:
        """Start the service, and wait until it is ready.

        keys: the key file.  arguments: more arguments of the command, such as the bundle; none after a restart.
        Errors: SystemExit when the service does not start, with its log.
        """
        self.folder, self.state = folder, folder / "service"
        words = ["--gateway", "--state", self.state, "--keys", keys, "--access-log", folder / "access.log"]
        serve = Serve(None, *arguments, *words, log=folder / "service.log")
        self.process = serve.process
        self.where = serve.ready()

    def __enter__(self) -> StateService:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self.kill()

    def order(self, **changes: Any) -> dict[str, Any]:
        """Send an order for a rollout, `ORDER` with ``changes``, and return the last event."""
        *_, last = send_order(self.state, {**ORDER, **changes})
        return last

    def stop(self) -> int:
        """End the service with SIGTERM, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_STOP_S)

    def kill(self) -> None:
        """Kill the service if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def png(size: int = 32) -> bytes:
    """Return an image, by default of the network's size."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((size, size, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@contextlib.contextmanager
def classifying(service: StateService, clients: int = 4) -> Iterator[list[Answer]]:
    """Send images to ``POST /classify`` from several clients at a time; yield the list that receives the answers."""
    answers: list[Answer] = []

    def send(ended: threading.Event) -> None:
        while not ended.is_set():
            answers.append(request(service.where["http"], "/classify", png()))

    with in_threads(send, clients):
        yield answers


def load(service: StateService, bundles: dict[str, Bundle], rate: float = 60.0, **options: Any) -> CheckedLoad:
    pixels, *others = (bundle.golden()[0] for bundle in bundles.values())
    assert all(np.array_equal(pixels, other) for other in others)
    expected = {each.sha256: each.golden()[1] for each in bundles.values()}
    return CheckedLoad(
        grpc_url=service.where["grpc"],
        http_url=service.where["http"],
        key=KEY,
        pixels=pixels,
        expected=expected,
        rate=rate,
        clients=1,
        **options,
    )


def promoted(service: StateService, name: str = DEFAULT_MODEL) -> str:
    return State(service.state).promoted()[name].bundle


def other_bundle(service: StateService, bundles: dict[str, Bundle]) -> Bundle:
    """Return a bundle that the service does not serve."""
    served = promoted(service)
    return next(bundles[name] for name in ("gmm", "elm") if bundles[name].sha256 != served)


def processes(service: StateService, kind: str) -> set[int]:
    """Return the PIDs of the programs of this name below the service."""
    return {pid for pid, name in kinds_of(service.process.pid).items() if name == kind}
