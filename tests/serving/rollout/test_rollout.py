"""Rollouts of real bundles behind a real gateway, under load: no request is lost, and no answer is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE, MANIFEST_FILE, Bundle
from gmmvit_deploy.errors import GmmvitError, InputError, ServerError
from gmmvit_deploy.serving.rollout._orders import first_bundles
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.rollout.control import send_order
from tests.documented import ROOT
from tests.haproxy import needs_haproxy
from tests.serving.gateways import key_file, request
from tests.serving.rollout.state_service import StateService, classifying, load, other_bundle, png, processes, promoted
from tests.waiting import wait_until

pytestmark = [needs_haproxy, pytest.mark.integration]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, bundles: dict[str, Bundle]) -> Iterator[StateService]:
    folder = tmp_path_factory.mktemp("rollout")
    running = StateService(folder, key_file(folder), str(bundles["gmm"].path))
    yield running
    running.kill()


@pytest.mark.nightly
def test_rollouts_under_load_lose_nothing_and_every_answer_states_its_bundle(
    service: StateService, bundles: dict[str, Bundle]
) -> None:
    with load(service, bundles) as clients, classifying(service, clients=1) as images:
        clients.await_more(12)
        answer = service.order(bundle=str(bundles["elm"].path))
        assert "done" in answer, answer
        clients.await_more(12)
        assert promoted(service) == bundles["elm"].sha256
        (status,) = send_order(service.state, {"order": "status"})
        answer = service.order(bundle=status["status"]["before_path"])  # the way back
        assert "done" in answer, answer
        assert promoted(service) == bundles["gmm"].sha256
        clients.await_more(12)
    assert (clients.lost, clients.wrong) == ([], [])
    assert clients.total > 100
    both = {bundles["gmm"].sha256, bundles["elm"].sha256}
    assert {bundle for bundle, count in clients.answered.items() if count} == both
    assert [(answer.status, answer.body) for answer in images if answer.status != 200] == []
    assert {answer.headers["x-gmmvit-bundle"] for answer in images} == both
    assert all(answer.json()["bundle"] == answer.headers["x-gmmvit-bundle"] for answer in images)
    assert all(answer.json()["runner"] == answer.headers["x-gmmvit-runner"] for answer in images)


@pytest.mark.nightly
def test_other_labels_of_the_images_go_back(service: StateService, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    paths = []
    for number in range(8):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(paths[-1])
    before = promoted(service)
    answer = service.order(
        bundle=str(bundles["labels"].path),
        images=[str(path) for path in paths],
        allow_contract_change=True,
        agreement=1.0,
    )
    if "error" in answer:
        assert "the same label as the old server" in answer["error"]
        assert promoted(service) == before
    else:
        pytest.fail("the two bundles give the same labels to all images: choose other images")


@pytest.mark.first(1)
@pytest.mark.parametrize("array", ["logits", pytest.param("image_logits", marks=pytest.mark.nightly)])
def test_other_answers_than_the_golden_answers_go_back_under_load(
    array: str, service: StateService, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    """A valid bundle whose network does not give the stored logits: only an inference shows it."""
    before = promoted(service)
    folder = tmp_path / "bundle"
    shutil.copytree(other_bundle(service, bundles).path, folder)
    with np.load(folder / GOLDEN_FILE) as stored:
        arrays = dict(stored)
    arrays[array][-1, 3] += 0.01
    np.savez(folder / GOLDEN_FILE, **arrays)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"][GOLDEN_FILE] = hashlib.sha256((folder / GOLDEN_FILE).read_bytes()).hexdigest()
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with load(service, bundles) as clients:
        answer = service.order(bundle=str(folder))
    assert "the logits differ from PyTorch's by 0.01" in answer["error"]
    assert answer["hint"]
    assert (clients.lost, clients.wrong) == ([], [])
    assert {bundle for bundle, count in clients.answered.items() if count} == {before}
    assert promoted(service) == before


def test_a_contract_change_is_refused_by_name_and_counted(service: StateService, bundles: dict[str, Bundle]) -> None:
    before, counted = promoted(service), rollout_metrics(service)
    answer = service.order(bundle=str(bundles["labels"].path))
    assert "class 0 is 'airplane' in the served bundle and 'automobile' in the new bundle" in answer["error"]
    assert "--allow-contract-change" in answer["hint"]
    assert promoted(service) == before
    refused = 'gmmvit_rollouts_total{result="refused"}'  # it failed before its first step
    assert counted["gmmvit_rollout_running"] == 0
    assert rollout_metrics(service) == {**counted, refused: counted[refused] + 1}


def test_no_bundle_and_the_served_bundle_are_refused(
    service: StateService, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    assert "expected a bundle" in service.order(bundle=str(tmp_path))["error"]
    served = next(each for each in bundles.values() if each.sha256 == promoted(service))
    assert "serves this bundle already" in service.order(bundle=str(served.path))["error"]


@pytest.mark.nightly
def test_an_abort_under_load_goes_back_and_refuses_no_image(
    service: StateService, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    before, other = promoted(service), other_bundle(service, bundles)
    with classifying(service) as answers:
        abort_a_rollout(service, before, other, tmp_path)
        count = len(answers)
        wait_until(lambda: len(answers) >= count + 20, "20 answers after the abort")
    assert [(answer.status, answer.body) for answer in answers if answer.status != 200] == []
    assert {answer.headers["x-gmmvit-bundle"] for answer in answers} == {before}
    assert promoted(service) == before
    (refused,) = send_order(service.state, {"order": "abort"})
    assert "no rollout is running" in refused["error"]
    assert f"gmmvit rollout --status --to {service.state}" in refused["hint"]
    assert {line["model"] for line in access_log(service) if line["path"] == "/classify"} == {"gmmvit"}


def abort_a_rollout(service: StateService, before: str, other: Bundle, folder: Path) -> None:
    """Abort a rollout while both servers classify images, after the front of the new server was killed."""
    fronts = processes(service, "front")
    (folder / "image.png").write_bytes(png())
    results: list[dict[str, Any]] = []
    order = {"bundle": str(other.path), "images": [str(folder / "image.png")] * 2000, "agreement": 0.0}
    thread = threading.Thread(target=lambda: results.append(service.order(**order)))
    thread.start()
    step = lambda: next(iter(send_order(service.state, {"order": "status"})))["status"]["step"]  # noqa: E731
    wait_until(lambda: "reference outputs" in step(), "the comparison of the images")
    (killed,) = processes(service, "front") - fronts
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: processes(service, "front") - fronts - {killed}, "a restart of the front")
    second = service.order(bundle=str(other.path))
    assert "another rollout is running" in second["error"]
    (aborted,) = send_order(service.state, {"order": "abort"})
    assert f"the rollout has ended; the service goes on with bundle {before[:12]}" in aborted["done"]
    thread.join(60)
    assert results[0]["error"] == "the rollout was aborted"


def test_the_documented_command_ends_the_process_of_the_server_alone(service: StateService) -> None:
    page = (ROOT / "docs/pages/operate.md").read_text(encoding="utf-8")
    (command,) = set(re.findall(r"`pkill -9 (-P PID \w+)`", page))
    words = ["pgrep", *command.replace("PID", str(service.process.pid)).split()]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert {int(pid) for pid in printed} == processes(service, "tritonserver")
    assert len(printed) == 1


def access_log(service: StateService) -> list[dict[str, Any]]:
    log = (service.state.parent / "access.log").read_text()
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]  # not HAProxy's own messages


def rollout_metrics(service: StateService) -> dict[str, float]:
    lines = request(service.where["metrics"], "/metrics").body.decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if line.startswith("gmmvit_rollout")]
    return {name: float(value) for name, _, value in samples}


@pytest.mark.nightly
def test_after_a_restart_the_service_serves_the_promoted_bundle(
    service: StateService, bundles: dict[str, Bundle]
) -> None:
    """The last test that uses the service: it stops the service."""
    before = promoted(service)
    other = next(bundles[name] for name in ("gmm", "elm") if bundles[name].sha256 != before)
    assert "done" in service.order(bundle=str(other.path))
    with pytest.raises(ServerError, match="already running"), State(service.state).locked():
        pytest.fail("the state folder of a running service was locked")
    assert service.stop() == 0
    again = StateService(service.folder, key_file(service.folder), "--request-pixels", "5000")
    try:
        answer = request(again.where["http"], "/v2/models/gmmvit/config")
        assert answer.headers["x-gmmvit-bundle"] == other.sha256
        answer = request(again.where["http"], "/classify", png(size=100))
        assert (answer.status, "the maximum is 5000 pixels" in answer.json()["error"]) == (400, True)
    finally:
        assert again.stop() == 0
    assert {bundles["gmm"].sha256, bundles["elm"].sha256} <= {line["bundle"] for line in access_log(service)}


def test_a_service_starts_with_its_promoted_bundle_or_asks_for_a_bundle(
    tmp_path: Path, bundles: dict[str, Bundle]
) -> None:
    state = State(tmp_path)
    with pytest.raises(InputError, match="no bundle was promoted"):
        first_bundles(state, {})
    first = first_bundles(state, {"gmmvit": bundles["gmm"]})
    state.promote(first)
    assert first_bundles(state, {}) == first
    with pytest.raises(GmmvitError, match="not this bundle") as caught:
        first_bundles(state, {"gmmvit": bundles["elm"]})
    assert "gmmvit rollout" in caught.value.hint
    with pytest.raises(InputError, match="has the models gmmvit, not cats"):
        first_bundles(state, {"cats": bundles["gmm"]})
