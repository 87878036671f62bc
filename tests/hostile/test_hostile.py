"""Hostile images are refused or decoded, and commands refuse hostile files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.inference.preprocess import UnusableImage
from tests.conftest import rgb
from tests.hostile.bundles import BUNDLES, sound_bundle
from tests.hostile.case import REFUSED
from tests.hostile.checkpoints import CHECKPOINTS
from tests.hostile.commands import Sandbox, gmmvit
from tests.hostile.images import IMAGES


@pytest.mark.parametrize("case", [case for case in IMAGES if "49 million" not in case.name], ids=lambda case: case.name)
def test_hostile_images_are_refused_or_are_decoded(case) -> None:
    """Preprocessing in this process refuses an image with a reason, unless it is a valid image."""
    refused = []
    for image in case.make()[:8]:
        try:
            assert rgb(32).pixels_from_bytes(image).shape == (32, 32, 3)
        except UnusableImage as exc:
            refused.append(str(exc))
    if not case.name.startswith("request: "):
        assert refused or case.may_be_answered


@pytest.mark.integration
def test_commands_refuse_code_in_checkpoints_and_loops_in_bundles(tmp_path: Path) -> None:
    """``gmmvit export`` refuses the checkpoint, ``gmmvit parity`` the bundle; nothing runs or is written."""
    sandbox, sound = Sandbox(tmp_path / "commands" / "sandbox"), sound_bundle(tmp_path)
    (code,) = [case for case in CHECKPOINTS if case.name == "code: os.system by REDUCE"]
    (loop,) = [case for case in BUNDLES if case.name == "graph: Loop of 2**63 rounds"]
    for folder in ("code", "loop"):
        (tmp_path / folder).mkdir()
    commands = {
        "code": ["export", str(code.make(tmp_path / "code")), "-o", str(tmp_path / "out"), "--input", "tensor"],
        "loop": ["parity", str(loop.make(sound.path, tmp_path / "loop")), "--runner", "onnxruntime"],
    }
    for arguments in commands.values():
        before = sandbox.files()
        outcome = gmmvit(arguments, sandbox, timeout_s=120)
        assert outcome.answer == REFUSED, outcome
        assert sandbox.files() == before
    assert not (tmp_path / "out").exists()
