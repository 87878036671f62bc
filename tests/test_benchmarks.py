"""Some scripts in benchmarks/ run with ``--check`` and write no result; two need a GPU.  The run card of a result."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared import run_card
from gmmvit_deploy.bench.machine import MachineState, describe_machine
from gmmvit_deploy.intervals import Measured
from tests.documented import ROOT

RESULTS = ROOT / "benchmarks" / "results"
GPU_SCRIPTS = ("fastest_gpu", "masked_attention_gpu")
SCRIPTS = ("overload", "served", "ten_models")
"""Scripts whose check `make test-rest` runs.  A check takes up to three minutes: after a change to another script, run
its check by hand.
"""


def times_of_results() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}


def check(script: Path) -> None:
    before = times_of_results()
    command = [sys.executable, str(script), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert times_of_results() == before


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str) -> None:
    check(ROOT / "benchmarks" / f"{name}.py")


@pytest.mark.nightly
def test_every_script_imports_what_it_uses() -> None:
    for path in (ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(f"benchmarks.{path.stem}")


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.nightly
def test_the_scripts_of_gpus_run() -> None:
    for name in GPU_SCRIPTS:
        check(ROOT / "benchmarks" / f"{name}.py")


STEADY, WIDE = Measured(value=1.0, low=0.95, high=1.1), Measured(value=1.0, low=0.8, high=1.1)
WIDE_REASON = "unstable: vit, 1: the interval spans 30% of the ratio, expected at most 25%"
TOO_FAST = "unstable: vit, 1: 102% of the roofline, expected at most 100%"


@pytest.mark.parametrize(
    ("measured", "others", "timed", "reasons"),
    [
        (STEADY, 0.0, True, []),
        (WIDE, 0.0, True, [WIDE_REASON]),
        (WIDE, 0.0, False, []),
        ({"share_of_roofline": 1.02}, 0.0, True, [TOO_FAST]),
        (STEADY, 0.5, True, ["machine busy: other programs took 50% of the machine before the run, expected at most"]),
    ],
)
def test_the_run_card_states_whether_a_result_is_valid(
    measured: Any, others: float, timed: bool, reasons: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = MachineState(load=0.1, others=others, stolen=0.0, spin_ms=1.0, megahertz=())
    monkeypatch.setattr(run_card, "machine_state", lambda: state)
    with run_card.written(tmp_path / "result.json", "script.py", timed=timed, rounds=3) as results:
        results["vit"] = {"1": measured}
    written = json.loads((tmp_path / "result.json").read_text())
    card = written["card"]
    assert (card["verdict"], card["settings"]) == ("INVALID" if reasons else "VALID", {"rounds": 3})
    assert all(actual.startswith(expected) for actual, expected in zip(card["reasons"], reasons, strict=False))
    assert bool(card["reasons"]) == bool(reasons)
    assert card.items() >= describe_machine().items()
    if measured is STEADY:
        assert written["vit"]["1"] == {"value": 1.0, "low": 0.95, "high": 1.1}


def test_a_problem_makes_a_run_invalid_also_without_times_and_an_error_writes_nothing(tmp_path: Path) -> None:
    with run_card.written(tmp_path / "result.json", "script.py", timed=False) as results:
        results["problems"] = ["1 requests were lost"]
    card = json.loads((tmp_path / "result.json").read_text())["card"]
    assert (card["verdict"], card["reasons"]) == ("INVALID", ["1 requests were lost"])
    with pytest.raises(SystemExit), run_card.written(tmp_path / "other.json", "script.py", timed=False):
        raise SystemExit("answers are wrong")
    assert not (tmp_path / "other.json").exists()
