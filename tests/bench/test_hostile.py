"""The tables of hostile inputs are complete, and the scripts that send them run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.reported.hostile import CASES, recorded, summary
from benchmarks.shared.hostile.case import ANSWERED, CRASH, HANG, KINDS, REFUSED, Outcome
from benchmarks.shared.hostile.checkpoints import CHECKPOINTS
from benchmarks.shared.hostile.images import IMAGES
from benchmarks.shared.places import ROOT
from benchmarks.shared.tables_serving import hostile_table, image_bombs_table
from gmmvit_deploy.preprocess import UnusableImage
from tests.conftest import rgb

SCRIPTS = ROOT / "benchmarks" / "reported"


def test_there_are_200_inputs_and_20_of_each_kind() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert sum(kinds.values()) >= 200
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 20
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [case for case in IMAGES if "49 million" not in case.name], ids=lambda case: case.name)
def test_hostile_images_are_refused_or_are_decoded(case) -> None:
    """Each image is made, and preprocessing in this process refuses it with a reason, unless it is a valid image."""
    refused = []
    for image in case.make()[:8]:
        try:
            assert rgb(32).pixels_from_bytes(image).shape == (32, 32, 3)
        except UnusableImage as exc:
            refused.append(str(exc))
    if not case.name.startswith("request: "):
        assert refused or case.may_be_answered


@pytest.mark.parametrize("case", CHECKPOINTS[:4] + CHECKPOINTS[-6:], ids=lambda case: case.name)
def test_hostile_checkpoints_are_made(case, tmp_path: Path) -> None:
    assert case.make(tmp_path).is_relative_to(tmp_path)


def test_a_record_states_what_is_not_right() -> None:
    case = IMAGES[0]
    assert not case.may_be_answered
    records = [recorded(case, Outcome(answer, ""), wrote=[]) for answer in (REFUSED, ANSWERED, CRASH, HANG)]
    assert [record["right"] for record in records] == [True, False, False, False]
    counts = summary(records)
    name = f"image: {case.name}"
    assert counts["wrong"] == {CRASH: [name], HANG: [name], ANSWERED: [name]}
    assert counts["inputs"] == 1
    table = hostile_table({"direct": {"summary": counts, "memory": {"before_mb": 1, "after_mb": 2}}})
    assert "| direct | image | 1 | 1 | 0 | 0 | 1 | 1 |" in table


def test_an_input_without_a_key_must_not_be_answered() -> None:
    valid = next(case for case in IMAGES if case.may_be_answered)
    assert recorded(valid, Outcome(ANSWERED, ""), key=True)["right"]
    assert not recorded(valid, Outcome(ANSWERED, ""), key=False)["right"]


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.export
def test_commands_refuse_code_in_checkpoints_and_loops_in_bundles(tmp_path: Path) -> None:
    for kind, only in (("checkpoint", "code: os.system"), ("bundle", "Loop of")):
        run("hostile.py", "--kind", kind, "--only", only, "--output", str(tmp_path))
        result = json.loads((tmp_path / "commands.json").read_text())
        (record,) = result["records"]
        assert (record["answer"], record["right"], record["wrote"]) == (REFUSED, True, [])
        assert result["summary"]["inputs"] == 1


@pytest.mark.process
@pytest.mark.server
def test_requests_go_to_a_service(tmp_path: Path) -> None:
    run("hostile.py", "--kind", "http", "--kind", "grpc", "--only", "unknown input", "--output", str(tmp_path))
    result = json.loads((tmp_path / "direct.json").read_text())
    assert {record["kind"] for record in result["records"]} == {"http", "grpc"}
    assert all(record["right"] for record in result["records"])
    assert {"before_mb", "after_mb"} <= result["memory"].keys()


@pytest.mark.process
@pytest.mark.server
def test_image_bombs_runs(tmp_path: Path) -> None:
    run("image_bombs.py", "--rounds", "1", "--seconds", "1", "--output", str(tmp_path / "r.json"))
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["bombs"]["1,568 Mpx, refused"]["bombs"].keys() == {"refused"}
    assert result["bombs"]["49 Mpx"]["bombs"]["answered"] > 0
    assert "| 49 Mpx |" in image_bombs_table(result)
