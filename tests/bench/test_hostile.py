"""The tables of hostile inputs are complete, and the scripts that send them run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.reported.hostile import CASES, summary
from benchmarks.shared.hostile import asking
from benchmarks.shared.hostile.asking import Asker, recorded
from benchmarks.shared.hostile.case import ANSWERED, CRASH, HANG, KINDS, REFUSED, Case, Outcome
from benchmarks.shared.hostile.checkpoints import CHECKPOINTS
from benchmarks.shared.hostile.commands import Sandbox
from benchmarks.shared.hostile.images import IMAGES
from benchmarks.shared.hostile.normal_form import alike, lines, name_form
from benchmarks.shared.places import ROOT
from benchmarks.shared.tables_serving import hostile_table, image_bombs_table
from gmmvit_deploy.preprocess import UnusableImage
from tests.conftest import rgb
from tests.serving.gateways import require_haproxy

SCRIPTS = ROOT / "benchmarks" / "reported"


def test_there_are_200_inputs_and_20_of_each_kind() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert sum(kinds.values()) >= 200
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 20
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES)


# What ended, blocked or misled Triton 2.51, and what it refused: request → a part of the names of its inputs.
SEEN = {
    "nested JSON, compressed": "http: nested lists as gzip, 277 bytes",
    "nested JSON": "http: nested lists, 250,000 levels",
    "nested objects": "http: nested objects",
    "a chunk for each byte": "http: 2 million chunks of 1 byte",
    "megabytes of no JSON: letters, zeros, random": (
        "http: 5 MB of letters",
        "http: a body of zeros",
        "http: a body of random",
    ),
    "a bomb of gzip": "http: 200 MB of spaces as gzip",
    "a long text in JSON": "http: text of 300 MB in JSON",
    "a large gRPC message": "grpc: message of 600 MB",
    "the backend's own shared memory": ("http: region of the Python backend", "grpc: region of the Python backend"),
    "many image bombs": ("http: 32 images of 49 million pixels", "image: request: 32 images of 49 million pixels"),
    "image bombs": "grpc: 8 images of 49 million pixels",
    "idle connections": ("http: 500 idle connections", "grpc: 500 idle connections"),
    "bodies that stop": "http: 500 bodies that stop after 4 bytes",
    "large unfinished bodies": "http: 20 unfinished bodies of 20 MB",
    "headers and paths": ("http: 1,000 headers", "http: a header of 10 MB", "http: a path of 1 MB"),
    "numbers that wrap": ("http: 300 for UINT8", "http: -1 for UINT8", "http: NaN for UINT8", "grpc: 300 for UINT8"),
    "malformed requests": ("http: JSON that ends early", "http: shape below 0", "http: too few numbers"),
    "images that are refused": (
        "image: PNG: 400 million pixels in the header",
        "image: PNG: cut",
        "image: GIF",
        "image: PNG: 16-bit grey",
        "image: SVG",
        "image: empty",
        "image: request: a batch of no images",
        "image: request: more images than the batch",
    ),
    "wrong types, shapes and sizes": (
        "grpc: unknown data type",
        "grpc: batch of 65",
        "http: image of 4 GB by its length prefix",
        "http: shape of 2**63",
    ),
    "images that are taken": (
        "image: PNG: 16-bit colour",
        "image: PNG: alpha",
        "image: PNG: palette",
        "image: JPEG: CMYK",
        "image: JPEG: rotated by EXIF",
        "image: PNG: animation of four frames",
        "image: WebP: 200 frames",
    ),
    "names of models": (
        "http: model name in Unicode",
        "http: path with encoded ..",
        "http: model name of 5,000 letters",
    ),
    "administration": (
        "http: switch off the log",
        "http: log every request",
        "http: list the models",
        "http: list shared memory",
        "http: unregister all CUDA memory",
        "http: load a model",
        "http: unload the network",
        "http: write the log to a file",
        "http: trace to a file",
        "http: region with a path",
        "http: statistics",
    ),
    "shared memory that fills": "image: request: 64 blobs of random bytes",
}


@pytest.mark.parametrize("request_", SEEN)
def test_every_request_that_was_seen_is_an_input(request_: str) -> None:
    names = [f"{case.kind}: {case.name}" for case in CASES]
    expected = SEEN[request_]
    for start in (expected,) if isinstance(expected, str) else expected:
        assert any(name.startswith(start) for name in names), start


def test_every_input_is_a_line_of_a_table() -> None:
    assert {(kind, name) for kind, name, _ in lines()} == {(case.kind, case.name) for case in CASES}


def test_no_two_inputs_differ_in_a_size_or_a_seed_alone() -> None:
    assert alike(lines()) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a header of 20 MB", "lambda: other()"),
        ("a very long header", "lambda: _get(LIVE, f\"X: {'a' * 77}\")"),
        ("images in the shape", "lambda: _binary(_images(ONE_IMAGE, count=9), ONE_IMAGE)"),
        ("-7 for UINT8", "lambda: other()"),
    ],
)
def test_a_line_of_another_size_is_refused(name: str, source: str) -> None:
    table = [line for line in lines() if line[0] == "http"]
    assert alike([*table, ("http", "a new attack", "lambda: new()")]) == []
    assert len(alike([*table, ("http", name, source)])) == 1


def test_the_normal_form_keeps_what_makes_another_attack() -> None:
    assert name_form("a header of 10 MB") == name_form("header of 300 kB") != name_form("header of 0 bytes")
    assert len({name_form(f"{number} for UINT8") for number in ("300", "-1", "1.5", "0", "NaN")}) == 5


class LateDeath:
    """Stands for a service that ends 0.2 s after the input ``late``; a real server that ends late is not available."""

    key = ""

    def __init__(self) -> None:
        self.starts, self.dies = 0, float("inf")

    def restart(self) -> None:
        self.starts, self.dies = self.starts + 1, float("inf")

    def servers(self) -> set[int]:
        return {self.starts if time.monotonic() < self.dies else -1}

    def memory_mb(self) -> dict[str, int]:
        return {"Triton": 1}


def test_a_late_end_is_attributed_to_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, sandbox = LateDeath(), Sandbox(tmp_path / "sandbox")

    def sent(service: LateDeath, case: Case, *, key: bool) -> tuple[dict[str, Outcome], bool]:
        if case.name == "late":
            service.dies = time.monotonic() + 0.2
            (sandbox.temporary / "gmmvit-run-serve-new" / "backends").mkdir(parents=True, exist_ok=True)
            (sandbox.temporary / "dropped").touch()
        elif case.name == "slow":
            time.sleep(0.3)
        return {"http": Outcome(REFUSED, "no")}, False

    monkeypatch.setattr(asking, "_sent", sent)
    monkeypatch.setattr(asking, "sound", lambda service: True)
    monkeypatch.setattr(asking, "send_images", lambda *_, **__: None)
    monkeypatch.setattr(asking, "_SETTLE_S", 0.5)
    monkeypatch.setattr(asking, "_IDLE_S", 0.0)
    asker = Asker(service, sandbox)  # type: ignore[arg-type]
    asker.begin()
    records = {name: asker.ask(Case(kind="http", name=name, make=list), key=True) for name in ("calm", "late", "slow")}
    assert {name: record["answer"] for name, record in records.items()} == {
        "calm": REFUSED,
        "late": CRASH,
        "slow": REFUSED,
    }
    assert [name for name, record in records.items() if "dropped" in record["wrote"]] == ["late"]
    assert not any("backends" in record["wrote"] for record in records.values())
    assert asker.memory["restarts"] == 1
    assert asker.ended_together == []


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
    table = hostile_table(
        {"direct": {"summary": counts, "memory": {"before_mb": {"Triton": 1}, "rounds": [{"Triton": 2}]}}}
    )
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
@pytest.mark.matrix
def test_commands_refuse_code_in_checkpoints_and_loops_in_bundles(tmp_path: Path) -> None:
    for kind, only in (("checkpoint", "code: os.system"), ("bundle", "Loop of")):
        run("hostile.py", "--kind", kind, "--only", only, "--output", str(tmp_path))
        result = json.loads((tmp_path / "commands.json").read_text())
        (record,) = result["records"]
        assert (record["answer"], record["right"], record["wrote"]) == (REFUSED, True, [])
        assert result["summary"]["inputs"] == 1


@pytest.mark.process
@pytest.mark.server
def test_requests_go_through_the_gateway_twice(tmp_path: Path) -> None:
    require_haproxy()
    names = ("unknown input", "PNG: cut", "PNG: alpha", "2**32 + 1 images in", "length of 2**64", "data for a stream")
    run("hostile.py", "--gateway", "--rounds", "2", *(part for name in names for part in ("--only", name)),
        *("--kind", "image", "--kind", "http", "--kind", "grpc"), "--output", str(tmp_path))  # fmt: skip
    result = json.loads((tmp_path / "gateway.json").read_text())
    assert result["summary"]["wrong"] == {CRASH: [], HANG: [], ANSWERED: []}
    answers = {(r["kind"], r["name"], r["key"]): r["answer"] for r in result["records"]}
    assert len(answers) == 18
    assert answers["image", "PNG: alpha", True] == ANSWERED
    valid = {"PNG: alpha", "data for a stream that was never opened"}
    assert {answer for (_, name, _), answer in answers.items() if name not in valid} == {REFUSED}
    assert result["ended_together"] == []
    assert "restarts" not in result["memory"]
    before, *rounds = result["memory"]["before_mb"], *result["memory"]["rounds"]
    assert len(rounds) == 2
    assert {"Triton", "Triton's workers", "front", "gateway"} <= before.keys()


@pytest.mark.process
@pytest.mark.server
@pytest.mark.matrix
def test_image_bombs_runs(tmp_path: Path) -> None:
    run("image_bombs.py", "--rounds", "1", "--seconds", "1", "--output", str(tmp_path / "r.json"))
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["bombs"]["1,568 Mpx, refused"]["bombs"].keys() == {"refused"}
    assert result["bombs"]["49 Mpx"]["bombs"]["answered"] > 0
    assert "| 49 Mpx |" in image_bombs_table(result)
