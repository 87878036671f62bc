"""Mistakes in the options of a rollout and of a state folder: refused, with what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.rollout.canary import CanaryOptions, share_from
from gmmvit_deploy.rollout.state import State
from tests.cli.terminal import gmmvit_here


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        (("--canary-requests", "30"), "--canary-requests needs --canary"),
        (("--canary-timeout", "600"), "--canary-timeout needs --canary"),
        (("--canary-slower", "1.5"), "--canary-slower needs --canary"),
        (("--canary-agreement", "0.9"), "--canary-agreement needs --canary-images"),
        (("--canary", "5%", "--canary-agreement", "0.9"), "--canary-agreement needs --canary-images"),
    ],
)
def test_an_option_without_effect_is_refused(options: tuple[str, ...], needs: str, tmp_path: Path) -> None:
    answer = gmmvit_here("rollout", "bundle", "--to", tmp_path, *options)
    assert answer.status == 1
    error, hint = answer.err.splitlines()
    assert error == f"Error: {needs}"
    assert hint == f"hint: add {needs.split()[-1]} {'FOLDER' if 'images' in needs else '5%'}, or remove {options[-2]}"


@pytest.mark.parametrize(
    ("typed", "hint"), [("150%", "--canary 5%"), ("5", "--canary 5%"), ("12", "--canary 12%"), ("0", "--canary 5%")]
)
def test_a_share_that_is_none_gets_a_share_to_type(typed: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"got '{typed}'") as caught:
        share_from(typed)
    assert caught.value.hint == f"type {hint}"


def test_percent_of_agreement_gets_a_share_to_type() -> None:
    with pytest.raises(InputError, match="--canary-agreement: expected a share from 0 to 1, got 95") as caught:
        CanaryOptions(agreement=95.0)
    assert caught.value.hint == "type --canary-agreement 0.95"


@pytest.mark.parametrize("name", ["manifest.json", "photo.png"])
def test_a_folder_of_something_else_stays_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    named = "a bundle" if name == "manifest.json" else r"other files \(photo\.png\)"
    with pytest.raises(InputError, match=named), State(tmp_path).locked():
        pytest.fail("the folder was taken")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_folder_of_a_service_is_taken(tmp_path: Path) -> None:
    for name in ("lock", "control", ".promoted.json.partial-ab"):
        (tmp_path / name).write_text("")
    with State(tmp_path).locked():
        pass
    for name in ("promoted.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    with State(tmp_path).locked():
        pass
