"""Rollouts of real bundles behind a real gateway, under load: no request is lost, and no answer is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE, MANIFEST_FILE, Bundle, open_bundle
from gmmvit_deploy.errors import GmmvitError, InputError, ServerError
from gmmvit_deploy.serving.rollout._orders import first_bundles
from gmmvit_deploy.serving.rollout._rollout import RolloutOptions, served_name
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.rollout.control import ControlServer, Send, send_order
from tests.cli.terminal import gmmvit_here
from tests.conftest import once
from tests.documented import ROOT
from tests.haproxy import needs_haproxy
from tests.random_bundles import bundle_of, random_vit
from tests.serving.gateways import KEY, key_file, request
from tests.serving.rollout.checked_load import CheckedLoad
from tests.serving.rollout.state_service import StateService, classifying, load, other_bundle, png, processes, promoted
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, bundles: dict[str, Bundle]) -> Iterator[StateService]:
    folder = tmp_path_factory.mktemp("rollout")
    running = StateService(folder, key_file(folder), str(bundles["gmm"].path))
    yield running
    running.kill()


@pytest.mark.integration
@needs_haproxy
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


@pytest.mark.integration
@needs_haproxy
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


@pytest.mark.integration
@needs_haproxy
def test_a_contract_change_is_refused_by_name_and_counted(service: StateService, bundles: dict[str, Bundle]) -> None:
    before, counted = promoted(service), rollout_metrics(service)
    answer = service.order(bundle=str(bundles["labels"].path))
    assert "class 0 is 'airplane' in the served bundle and 'automobile' in the new bundle" in answer["error"]
    assert "--allow-contract-change" in answer["hint"]
    assert promoted(service) == before
    refused = 'gmmvit_rollouts_total{result="refused"}'  # it failed before its first step
    assert counted["gmmvit_rollout_running"] == 0
    assert rollout_metrics(service) == {**counted, refused: counted[refused] + 1}


@pytest.mark.integration
@needs_haproxy
def test_no_bundle_and_the_served_bundle_are_refused(
    service: StateService, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    assert "expected a bundle" in service.order(bundle=str(tmp_path))["error"]
    served = next(each for each in bundles.values() if each.sha256 == promoted(service))
    assert "serves this bundle already" in service.order(bundle=str(served.path))["error"]


@pytest.mark.integration
@needs_haproxy
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


@pytest.mark.integration
@needs_haproxy
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


@pytest.mark.integration
@needs_haproxy
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


@pytest.mark.integration
@needs_haproxy
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


# ---- larger images, which clients expect -----------------------------------------------------------------------------


WAIT = ("--in-flight", "1", "--queue-timeout", "10000")
"""With a single request at a time, the other clients' requests wait, if they fit into a buffer."""


@pytest.fixture(scope="module")
def larger(shared: Path) -> Bundle:
    """A ViT for images of 256×256: 196,608 bytes, more than the buffers of a gateway for 32×32."""

    def make(out: Path) -> None:
        bundle_of(random_vit(depth=1, image_size=256, patch_size=32), out.parent, name=out.name)

    return once(shared / "pixels_256", partial(make))


def load_of_larger_images(service: StateService, bundle: Bundle, rate: float) -> CheckedLoad:
    pixels, logits = bundle.golden()
    where = service.where
    return CheckedLoad(where["grpc"], where["http"], KEY, pixels, {bundle.sha256: logits}, rate)


@pytest.mark.nightly
@needs_haproxy
@pytest.mark.integration
def test_larger_images_wait_after_their_bundle_was_promoted(bundle: Bundle, larger: Bundle, tmp_path: Path) -> None:
    assert open_bundle(larger.path).manifest.image.tensor_shape == (3, 256, 256)
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(photo)
    with StateService(tmp_path, key_file(tmp_path), str(bundle.path), *WAIT) as service:
        with load_of_larger_images(service, bundle, rate=60) as clients:
            clients.await_more(5)
            # Refused after the gateway has changed for both bundles, so it changes back.
            order = {"bundle": str(larger.path), "allow_contract_change": True}
            refused = service.order(**order, images=[str(photo)] * 3, agreement=1.0)
            clients.await_more(5)
        assert "the same label as the old server" in refused["error"]
        assert (clients.lost, clients.wrong) == ([], [])
        assert "done" in service.order(**order)
        assert promoted(service) == larger.sha256
        with load_of_larger_images(service, larger, rate=1e9) as clients:
            clients.await_more(30)
        assert (clients.lost[:3], clients.wrong) == ([], [])
        assert service.stop() == 0
    sizes = re.findall(r"buffers of (\d+) bytes", (tmp_path / "service.log").read_text())
    assert sizes == ["245760", "131072", "245760"]


# ---- one of several models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "the service has several models: cats, shop"), ("dogs", "the service has no model dogs, only cats, shop")],
)
def test_a_name_that_decides_nothing_is_refused(name: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        served_name(name, ["shop", "cats"])
    assert "--name with one of cats, shop" in caught.value.hint


@needs_haproxy
@pytest.mark.integration
@pytest.mark.nightly
def test_one_of_two_models_is_exchanged_under_load_and_goes_back(tmp_path: Path, bundles: dict[str, Bundle]) -> None:
    shop, old, new = bundles["gmm"], bundles["elm"], bundles["gmm"]
    with StateService(tmp_path, key_file(tmp_path), f"shop={shop.path}", f"cats={old.path}") as service:
        assert "several models: cats, shop" in service.order(bundle=str(new.path))["error"]
        with (
            load(service, {"shop": shop}, network="shop_network") as of_shop,
            load(service, {"old": old, "new": new}, network="cats_network") as of_cats,
        ):
            of_shop.await_more(6)
            of_cats.await_more(6)
            assert set(of_cats.answered) == {old.sha256}
            words = ["rollout", str(new.path), "--to", str(service.state), "--name", "cats"]
            typed = subprocess.run(
                [sys.executable, "-m", "gmmvit_cli.main", *words], capture_output=True, text=True, check=True
            )
            assert typed.stdout == f"the service serves bundle {new.sha256} as cats\n"
            require_classified(service, {"shop": shop, "cats": new})
            (status,) = send_order(service.state, {"order": "status"})
            (cats, _) = status["status"]["models"]
            assert (cats["name"], cats["bundle"], cats["before"]) == ("cats", new.sha256, old.sha256)
            assert f"serves bundle {shop.sha256[:12]} as shop" in status["done"]
            of_cats.await_more(6)
            answer = service.order(bundle=cats["before_path"], name="cats")
            assert "done" in answer, answer
            require_classified(service, {"shop": shop, "cats": old})
            of_shop.await_more(6)
            of_cats.await_more(6)
        assert (of_shop.lost, of_shop.wrong, of_cats.lost, of_cats.wrong) == ([], [], [], [])
        assert (set(of_shop.answered), set(of_cats.answered)) == ({shop.sha256}, {old.sha256, new.sha256})
        assert (promoted(service, "shop"), promoted(service, "cats")) == (shop.sha256, old.sha256)
        assert service.stop() == 0
    with StateService(tmp_path, tmp_path / "keys.txt") as service:
        require_classified(service, {"shop": shop, "cats": old})


def require_classified(service: StateService, bundles: dict[str, Bundle]) -> None:
    """Hold the bundles that ``/classify/NAME`` states to those expected."""
    for name, bundle in bundles.items():
        answer = request(service.where["http"], f"/classify/{name}", png())
        assert (answer.status, answer.json()["bundle"]) == (200, bundle.sha256)


# ---- mistakes in the options -----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_percent_of_agreement_gets_a_share_to_type() -> None:
    with pytest.raises(InputError, match="--agreement: expected a share from 0 to 1, got 95") as caught:
        RolloutOptions(agreement=95.0)
    assert caught.value.hint == "type --agreement 0.95"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["manifest.json", "photo.png"])
def test_a_folder_of_something_else_stays_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    named = "a bundle" if name == "manifest.json" else r"a folder with other files \(photo\.png\)"
    with pytest.raises(InputError, match=named), State(tmp_path).locked():
        pytest.fail("the folder was taken")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    answer = gmmvit_here("rollout", "--status", "--to", tmp_path)
    assert answer.status == 1
    assert re.search(f"Error: --to .*: expected the state folder of a service, got {named}\n", answer.err)


@pytest.mark.nightly
def test_the_folder_of_a_service_is_taken(tmp_path: Path) -> None:
    for name in ("lock", "control", ".promoted.json.partial-ab"):
        (tmp_path / name).write_text("")
    with State(tmp_path).locked():
        pass
    for name in ("promoted.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    with State(tmp_path).locked():
        pass


@pytest.mark.nightly
@pytest.mark.integration
def test_an_interrupted_command_states_how_to_end_the_rollout(tmp_path: Path, bundle: Bundle) -> None:
    ended = threading.Event()

    def begin(order: dict[str, Any], send: Send) -> Mapping[str, Any]:
        send({"step": "begins"})
        ended.wait(60)
        return {"done": "rolled out"}

    command = [sys.executable, "-m", "gmmvit_cli.main", "rollout", str(bundle.path), "--to", str(tmp_path)]
    with ControlServer(State(tmp_path), {"rollout": begin}):
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        for process, number, status in zip(processes, (signal.SIGINT, signal.SIGTERM), (130, 143), strict=True):
            with process:
                assert process.stderr is not None
                assert process.stderr.readline() == "begins\n"
                process.send_signal(number)
                assert process.wait(30) == status
                words = f"the rollout goes on; type gmmvit rollout --abort --to {tmp_path} to end it"
                assert words in process.stderr.read()
        ended.set()
