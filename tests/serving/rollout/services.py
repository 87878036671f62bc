"""A service with a state folder, as the tests of rollouts see it."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.serving.rollout._state import State
from tests.serving.gateways import KEY, Answer, request
from tests.serving.processes import kinds_of
from tests.serving.rollout.checked_load import CheckedLoad
from tests.serving.rollout.state_service import StateService


def png(size: int = 32) -> bytes:
    """Return an image, by default of the network's size."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((size, size, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@contextmanager
def classifying(service: StateService, clients: int = 4) -> Iterator[list[Answer]]:
    """Send images to ``POST /classify`` from several clients at a time; yield the list that receives the answers."""
    answers: list[Answer] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            answers.append(request(service.where["http"], "/classify", png()))

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def load(service: StateService, bundles: dict[str, Bundle], rate: float = 60.0) -> CheckedLoad:
    pixels = bundles["gmm"].golden()[0]
    assert np.array_equal(pixels, bundles["elm"].golden()[0])
    expected = {each.sha256: each.golden()[1] for each in bundles.values()}
    return CheckedLoad(
        grpc_url=service.where["grpc"],
        http_url=service.where["http"],
        key=KEY,
        pixels=pixels,
        expected=expected,
        rate=rate,
        clients=1,
    )


def promoted(service: StateService) -> str:
    record = State(service.state).promoted()
    assert record is not None
    return record.bundle


def other_bundle(service: StateService, bundles: dict[str, Bundle]) -> Bundle:
    """Return a bundle that the service does not serve."""
    served = promoted(service)
    return next(bundles[name] for name in ("gmm", "elm") if bundles[name].sha256 != served)


def processes(service: StateService, kind: str) -> set[int]:
    """Return the PIDs of the programs of this name below the service."""
    return {pid for pid, name in kinds_of(service.process.pid).items() if name == kind}
