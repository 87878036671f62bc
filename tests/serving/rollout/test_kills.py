"""During a rollout under load, the service is killed at each step, HAProxy and the new server at two.

Some requests are lost then. No answer is wrong, the service answers again within ten seconds, and it serves the bundle
that the state folder names.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.rollout.control import send_order
from tests.haproxy import needs_haproxy
from tests.serving.gateways import key_file, request
from tests.serving.rollout.state_service import ORDER, StateService, load, other_bundle, png, processes, promoted
from tests.waiting import best_of, wait_until

pytestmark = [needs_haproxy, pytest.mark.integration, pytest.mark.nightly]

IMAGES = 600

STEPS = {
    "copy": "copy bundle",
    "start": "start the new server",
    "golden": "reference outputs",
    "all": "all traffic",
    "end": "end the old server",
}
"""Step → a part of its sentence."""
AT = {
    "HAProxy": ("golden", "all"),
    "new server": ("golden", "end"),
    "service": ("all", "copy", "start", "golden", "end"),
}
"""Process → the steps at which it is killed."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, bundles: dict[str, Bundle]) -> Iterator[list[StateService]]:
    """The running service, as the single entry of a list: a test that kills it puts in the next."""
    folder = tmp_path_factory.mktemp("kills")
    running = [StateService(folder, key_file(folder), str(bundles["gmm"].path))]
    yield running
    running[0].kill()


def killed(service: StateService, victim: str, old: set[int]) -> None:
    """Kill the process; a new server may start a moment after its step was reported."""
    pids_of = {
        "HAProxy": lambda: processes(service, "haproxy"),
        "new server": lambda: processes(service, "tritonserver") - old,
        "service": lambda: {service.process.pid},
    }[victim]
    for pid in wait_until(pids_of, f"a process to kill: {victim}"):
        os.kill(pid, signal.SIGKILL)


def answers(service: StateService) -> bool:
    raw = {"Inference-Header-Content-Length": "0"}
    with suppress(OSError):
        return request(service.where["http"], "/v2/models/gmmvit/infer", png(), headers=raw).status == 200
    return False


def roll_out_with_kill(
    services: list[StateService], new: Bundle, victim: str, step: str
) -> tuple[dict[str, Any], float]:
    """Roll out a bundle, kill the process at the step, and start a killed service again.

    Returns the last event, which may be empty, and the seconds from the end of the rollout, or from the start, until
    the service answers.
    """
    (service,) = services
    old, last, done = processes(service, "tritonserver"), {}, False
    order = {**ORDER, "bundle": str(new.path)}
    if step == "golden":  # the images take longer than the start of HAProxy
        (service.folder / "photo.png").write_bytes(png())
        order |= {"images": [str(service.folder / "photo.png")] * IMAGES, "agreement": 0.0}
    with suppress(ServerError):
        for last in send_order(service.state, order):
            if STEPS[step] in last.get("step", "") and not done:
                killed(service, victim, old)
                done = True
    assert done, last
    if victim == "service":
        service.kill()
        services[0] = StateService(service.folder, key_file(service.folder))
    began, looks = time.monotonic(), [-1.0]

    def answers_steadily() -> bool:
        """The gateway may know of a killed server only after some requests."""
        looks.append(time.monotonic() if answers(services[0]) else -1.0)
        return len(looks) > 10 and min(looks[-10:]) > 0

    wait_until(answers_steadily, "answers of the service", poll_s=0.2)
    return last, looks[-10] - began


@pytest.mark.parametrize(("victim", "step"), [(victim, step) for victim, steps in AT.items() for step in steps])
def test_a_kill_leaves_a_service_that_serves_what_its_state_names(
    services: list[StateService], bundles: dict[str, Bundle], victim: str, step: str
) -> None:
    (service,) = services
    before, new = promoted(service), other_bundle(service, bundles)
    with load(service, bundles) as clients:
        clients.await_more(2)
        last, _ = roll_out_with_kill(services, new, victim, step)
    (service,) = services
    assert clients.wrong == []
    with load(service, bundles) as clients:
        clients.await_more(4)
    assert (clients.lost, clients.wrong) == ([], [])
    assert set(clients.answered) == {promoted(service)}
    assert promoted(service) in {before, new.sha256}
    if "done" in last:
        assert promoted(service) == new.sha256
    if victim == "HAProxy":
        assert "done" in last, last
    if victim == "new server" and step == "golden":
        assert "the new server ended during the rollout" in last["error"]
        assert "signal" in last["error"]
        assert promoted(service) == before


@pytest.mark.alone
@pytest.mark.parametrize(("victim", "step"), [(victim, steps[0]) for victim, steps in AT.items()])
def test_a_service_answers_within_ten_seconds_of_a_kill(
    services: list[StateService], bundles: dict[str, Bundle], victim: str, step: str
) -> None:
    def measured_s() -> float:
        with load(services[0], bundles) as clients:
            clients.await_more(2)
            return roll_out_with_kill(services, other_bundle(services[0], bundles), victim, step)[1]

    assert best_of(3, measured_s, enough=10) < 10


@pytest.mark.parametrize("step", ["all", "end"])
def test_a_late_abort_states_what_is_served(
    services: list[StateService], bundles: dict[str, Bundle], step: str
) -> None:
    (service,) = services
    before, new = promoted(service), other_bundle(service, bundles)
    answers = []
    for event in send_order(service.state, {**ORDER, "bundle": str(new.path)}):
        if STEPS[step] in event.get("step", ""):
            answers += send_order(service.state, {"order": "abort"})
    (answer,) = answers
    served = request(service.where["http"], "/v2/models/gmmvit/config").headers["x-gmmvit-bundle"]
    assert served == promoted(service) == (before if "done" in answer else new.sha256)
    assert served[:12] in answer.get("done", answer.get("error"))
    if step == "end":
        assert f"too late: the rollout has promoted bundle {new.sha256[:12]}" in answer["error"]
