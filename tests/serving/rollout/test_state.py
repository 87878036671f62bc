"""The state folder of a service: what it keeps, orders over its socket, and what a new bundle must have in common."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, Manifest
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import BundleError, InputError, ServerError
from gmmvit_deploy.serving.rollout._checks import contract_changes, require_same_contract
from gmmvit_deploy.serving.rollout._state import Promoted, State, socket_address
from gmmvit_deploy.serving.rollout.control import ControlServer, Send, send_order


@pytest.mark.integration
def test_the_folder_keeps_the_promoted_bundle_and_the_bundle_before(
    tmp_path: Path, bundle: Bundle, tensor_bundle: Bundle, precise_bundle: Bundle
) -> None:
    state = State(tmp_path)
    for each in (bundle, tensor_bundle, precise_bundle, precise_bundle):  # the last one again
        state.promote({"cats": state.copy_of("cats", each), "shop": state.copy_of("shop", tensor_bundle)})
    assert state.promoted() == {
        "cats": Promoted(bundle=precise_bundle.sha256, before=tensor_bundle.sha256),
        "shop": Promoted(bundle=tensor_bundle.sha256),
    }
    kept = {"cats": {precise_bundle.sha256, tensor_bundle.sha256}, "shop": {tensor_bundle.sha256}}
    assert {path.name: {copy.name for copy in path.iterdir()} for path in (tmp_path / "bundles").iterdir()} == kept


@pytest.mark.integration
def test_a_copy_gets_the_graphs_that_were_converted_since(
    tmp_path: Path, bundle: Bundle, precise_bundle: Bundle
) -> None:
    State(tmp_path).copy_of("gmmvit", bundle)
    copy = State(tmp_path).copy_of("gmmvit", precise_bundle)  # the same bundle, with graphs in other precisions
    assert open_variant(copy, "int8", "static").sha256 == open_variant(precise_bundle, "int8", "static").sha256


@pytest.mark.integration
def test_models_share_no_copy(tmp_path: Path, bundle: Bundle, precise_bundle: Bundle) -> None:
    plain = State(tmp_path).copy_of("plain", bundle)
    State(tmp_path).copy_of("fast", precise_bundle)  # the same bundle, with graphs in other precisions
    assert not (plain.path / "graphs").exists()


@pytest.mark.integration
def test_a_damaged_copy_is_refused(tmp_path: Path, bundle: Bundle) -> None:
    state = State(tmp_path)
    state.promote({"gmmvit": state.copy_of("gmmvit", bundle)})
    (state.path_of("gmmvit", bundle.sha256) / "labels.txt").write_text("wrong\n", encoding="utf-8")
    with pytest.raises(BundleError, match=r"labels\.txt"):
        state.promoted_bundles()


@pytest.mark.integration
@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a": "b"}', '{"a": {"bundle": 3}}', '{"a": {"bundle": "b", "more": "c"}}', "\x00"]
)
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "promoted.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="expected the record of the promoted bundles, got other content"):
        State(tmp_path).promoted()


@pytest.mark.integration
def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="state folder of a service, got a file"), State(tmp_path / "file").locked():
        pytest.fail("a file was taken for a folder")


@pytest.mark.integration
def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at most 99 bytes"):
        socket_address(tmp_path / ("x" * 120) / "control")


# ---- orders over the socket ------------------------------------------------------------------------------------------


def count(order: dict[str, Any], send: Send) -> Mapping[str, Any]:
    for step in range(int(order["to"])):
        send({"step": str(step)})
    return {"done": "counted"}


def crash(order: dict[str, Any], send: Send) -> Mapping[str, Any]:
    raise KeyError("boom")


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path)


def test_an_unexpected_error_ends_the_order_and_not_the_service(state: State) -> None:
    with ControlServer(state, {"crash": crash, "count": count}):
        (event,) = send_order(state.folder, {"order": "crash"})
        assert "unexpected KeyError" in event["error"]
        assert list(send_order(state.folder, {"order": "count", "to": 0})) == [{"done": "counted"}]


@pytest.mark.parametrize("sent", [b"not json\n", b"[]\n", b"x" * 70000, b""])
def test_what_is_no_order_is_refused(state: State, sent: bytes) -> None:
    with ControlServer(state, {}), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(state.socket_path))
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b"expected an order" in client.recv(4096)


def test_without_a_service_the_error_states_how_to_start_it(state: State) -> None:
    with pytest.raises(ServerError, match="no service with this state folder is running") as caught:
        list(send_order(state.folder, {"order": "status"}))
    assert caught.value.hint.startswith("type gmmvit serve BUNDLE --gateway --keys FILE --state")
    state.record_path.write_text("{}")
    with pytest.raises(ServerError) as caught:
        list(send_order(state.folder, {"order": "status"}))
    assert caught.value.hint.startswith("type gmmvit serve --gateway --keys FILE --state")


def test_a_service_that_ends_in_the_middle_is_an_error(state: State) -> None:
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(state.socket_path))
        service.listen()

        def answer_half() -> None:
            connection, _ = service.accept()
            connection.recv(100)
            connection.sendall(b'{"step": "begins"}\n')
            connection.close()

        thread = threading.Thread(target=answer_half)
        thread.start()
        with pytest.raises(ServerError, match="ended before the order was complete"):
            list(send_order(state.folder, {"order": "status"}))
        thread.join()


def test_the_socket_is_for_its_owner_alone(state: State) -> None:
    with ControlServer(state, {}):
        assert state.socket_path.stat().st_mode & 0o077 == 0
    assert not state.socket_path.exists()


# ---- what a new bundle must have in common with the served bundle ----------------------------------------------------


class _Changed:
    """A manifest with other values; `Manifest` itself refuses values that contradict its spec."""

    def __init__(self, manifest: Manifest, **values: Any) -> None:
        self._manifest, self._values = manifest, values

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name, getattr(self._manifest, name))


BROKEN: dict[str, tuple[Callable[[Manifest], dict[str, Any]], str]] = {
    "a renamed class": (
        lambda old: {"labels": (*old.labels[:3], "zebra", *old.labels[4:])},
        "labels: class 3 is 'cat' in the served bundle and 'zebra' in the new bundle",
    ),
    "exchanged classes": (
        lambda old: {"labels": (old.labels[1], old.labels[0], *old.labels[2:])},
        "and 1 other classes differ",
    ),
    "fewer classes": (lambda old: {"labels": old.labels[:-1]}, "the served bundle has 10, the new bundle has 9"),
    "a larger image": (
        lambda old: {"image": replace(old.image, height=64, width=64)},
        "32×32 pixels with 3 channels, the new bundle has 64×64 pixels",
    ),
    "a smaller batch": (lambda old: {"max_batch": old.max_batch - 1}, "largest batch: the served bundle takes 8"),
    "no preprocessing": (lambda old: {"image": replace(old.image, mean=None, std=None)}, "encoded images: "),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_named(name: str, bundle: Bundle) -> None:
    changes, sentence = BROKEN[name]
    (change,) = contract_changes(bundle.manifest, _Changed(bundle.manifest, **changes(bundle.manifest)))  # type: ignore[arg-type]
    assert sentence in change


@pytest.mark.integration
def test_a_larger_batch_breaks_no_promise(bundle: Bundle) -> None:
    larger = replace(bundle.manifest, max_batch=bundle.manifest.max_batch + 1)
    assert contract_changes(bundle.manifest, larger) == ()
    require_same_contract(bundle, bundle)


@pytest.mark.integration
def test_the_error_lists_the_changes_and_how_to_allow_them(bundle: Bundle, tensor_bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"clients of the served bundle [0-9a-f]{12} would notice") as caught:
        require_same_contract(bundle, tensor_bundle)
    assert "input type: the served bundle has pixels, the new bundle has tensor" in str(caught.value)
    assert "--allow-contract-change" in caught.value.hint
