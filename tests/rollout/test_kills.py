"""HAProxy, the new server and the service itself are killed at each step of a rollout, under load.

Some requests are lost then. No answer is wrong, the service answers again within ten seconds, and it serves the bundle
that the state folder names.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.shared.state_service import ORDER, StateService
from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.rollout.control import send_order
from tests.rollout.services import load, other_bundle, processes, promoted
from tests.serving.gateways import key_file, request, require_haproxy

pytestmark = [pytest.mark.server, pytest.mark.export]

IMAGES = 600

STEPS = {
    "copy": "copy bundle",
    "start": "start the new server",
    "golden": "golden answers",
    "canary": "of the traffic",
    "all": "all traffic",
    "end": "end the old server",
}
"""Step → a part of its sentence."""
AT = {
    "HAProxy": ("golden", "start", "canary", "all", "end"),
    "new server": ("canary", "start", "golden", "all", "end"),
    "service": ("all", "copy", "start", "golden", "canary", "end"),
}
"""Process → the steps at which it is killed; `make test` runs the first."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, bundles: dict[str, Bundle]) -> Iterator[list[StateService]]:
    """The running service, as the single entry of a list: a test that kills it puts in the next."""
    require_haproxy()
    folder = tmp_path_factory.mktemp("kills")
    running = [StateService(folder, key_file(folder), str(bundles["gmm"].path))]
    yield running
    running[0].kill()


def killed(service: StateService, victim: str, old: set[int]) -> None:
    """Kill the process; a new server may start a moment after its step was reported."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pids = {
            "HAProxy": processes(service, "haproxy"),
            "new server": processes(service, "tritonserver") - old,
            "service": {service.process.pid},
        }[victim]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if pids:
            return
        time.sleep(0.02)
    pytest.fail(f"there is no process to kill: {victim}")


def rolled_out_with_kill(service: StateService, bundle: Bundle, victim: str, step: str) -> dict[str, Any]:
    """Roll out a bundle, kill the process at the step, and return the last event, which may be empty."""
    old, last, done = processes(service, "tritonserver"), {}, False
    order = {**ORDER, "bundle": str(bundle.path), "canary_share": 0.4}
    if step == "golden":  # the new server has no share yet, and the images take longer than the start of HAProxy
        images = [str(photo(service))] * IMAGES
        order |= {"canary_share": None, "canary_images": images, "canary_agreement": 0.0}
    with suppress(ServerError):
        for last in send_order(service.state, order):
            if STEPS[step] in last.get("step", "") and not done:
                killed(service, victim, old)
                done = True
    assert done, last
    return last


def photo(service: StateService) -> Path:
    path = service.folder / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return path


def wait_for_answer(service: StateService) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with suppress(OSError):
            if request(service.where["http"], "/v2/health/ready").status == 200:
                return
        time.sleep(0.05)
    pytest.fail("the service did not answer within ten seconds")


@pytest.mark.parametrize(("victim", "step"), [(victim, step) for victim, steps in AT.items() for step in steps])
def test_a_kill_at_each_step_leaves_a_service_that_serves_what_its_state_names(
    services: list[StateService], bundles: dict[str, Bundle], victim: str, step: str
) -> None:
    (service,) = services
    before, new = promoted(service), other_bundle(service, bundles)
    with load(service, bundles) as clients:
        time.sleep(0.3)
        last = rolled_out_with_kill(service, new, victim, step)
        if victim == "service":
            service.kill()
            service = services[0] = StateService(service.folder, key_file(service.folder))
        wait_for_answer(service)
    assert clients.wrong == []
    with load(service, bundles) as clients:
        time.sleep(1)
    assert (clients.lost, clients.wrong) == ([], [])
    assert min(clients.sent.values()) > 3
    assert set(clients.answered) == {promoted(service)}
    assert promoted(service) in {before, new.sha256}
    if "done" in last:
        assert promoted(service) == new.sha256
    if victim == "HAProxy":
        assert "done" in last, last
    if victim == "new server" and step in ("golden", "canary"):
        assert "the new server ended during the rollout" in last["error"]
        assert "signal" in last["error"]
        assert promoted(service) == before


def test_an_abort_after_the_last_step_is_refused(services: list[StateService], bundles: dict[str, Bundle]) -> None:
    (service,) = services
    new = other_bundle(service, bundles)
    answers = []
    for event in send_order(service.state, {**ORDER, "bundle": str(new.path)}):
        if STEPS["end"] in event.get("step", ""):
            answers += send_order(service.state, {"order": "abort"})
    assert f"too late: the rollout has promoted bundle {new.sha256[:12]}" in answers[0]["error"]
    assert promoted(service) == new.sha256


def test_an_abort_in_the_step_of_all_traffic_states_what_is_served(
    services: list[StateService], bundles: dict[str, Bundle]
) -> None:
    (service,) = services
    before, new = promoted(service), other_bundle(service, bundles)
    answers = []
    for event in send_order(service.state, {**ORDER, "bundle": str(new.path)}):
        if STEPS["all"] in event.get("step", ""):
            answers += send_order(service.state, {"order": "abort"})
    (answer,) = answers
    served = request(service.where["http"], "/v2/models/gmmvit/config").headers["x-gmmvit-bundle"]
    assert served == promoted(service)
    assert served == (before if "done" in answer else new.sha256)
    assert served[:12] in (answer["done"] if "done" in answer else answer["error"])
