"""The state folder: the record of the promoted bundle, the copies of bundles, and the lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import BundleError, InputError
from gmmvit_deploy.serving.rollout._state import Promoted, State, socket_address

pytestmark = pytest.mark.integration


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


def test_a_copy_gets_the_graphs_that_were_converted_since(
    tmp_path: Path, bundle: Bundle, precise_bundle: Bundle
) -> None:
    State(tmp_path).copy_of("gmmvit", bundle)
    copy = State(tmp_path).copy_of("gmmvit", precise_bundle)  # the same bundle, with graphs in other precisions
    assert open_variant(copy, "int8", "static").sha256 == open_variant(precise_bundle, "int8", "static").sha256


def test_models_share_no_copy(tmp_path: Path, bundle: Bundle, precise_bundle: Bundle) -> None:
    plain = State(tmp_path).copy_of("plain", bundle)
    State(tmp_path).copy_of("fast", precise_bundle)  # the same bundle, with graphs in other precisions
    assert not (plain.path / "graphs").exists()


def test_a_copy_is_written_again_only_where_it_differs(tmp_path: Path, precise_bundle: Bundle) -> None:
    folder = State(tmp_path).copy_of("gmmvit", precise_bundle).path / "graphs"
    changed, *others = sorted(folder.iterdir())
    changed.write_bytes(b"other")
    before = [file.stat().st_ino for file in others]
    State(tmp_path).copy_of("gmmvit", precise_bundle)
    assert changed.read_bytes() == (precise_bundle.path / "graphs" / changed.name).read_bytes()
    assert [file.stat().st_ino for file in others] == before


def test_a_damaged_copy_is_refused(tmp_path: Path, bundle: Bundle) -> None:
    state = State(tmp_path)
    state.promote({"gmmvit": state.copy_of("gmmvit", bundle)})
    (state.path_of("gmmvit", bundle.sha256) / "labels.txt").write_text("wrong\n", encoding="utf-8")
    with pytest.raises(BundleError, match=r"labels\.txt"):
        state.promoted_bundles()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a": "b"}', '{"a": {"bundle": 3}}', '{"a": {"bundle": "b", "more": "c"}}', "\x00"]
)
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "promoted.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="expected the record of the promoted bundles, got other content"):
        State(tmp_path).promoted()


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="state folder of a service, got a file"), State(tmp_path / "file").locked():
        pytest.fail("a file was taken for a folder")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at most 99 bytes"):
        socket_address(tmp_path / ("x" * 120) / "control")
