"""Benchmarks are run for their numbers elsewhere; here, that they run and say what they claim."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bench.machine import MachineState
from gmmvit_deploy.engines.flavors import visible_gpu
from gmmvit_deploy.kernels.libraries import onnxruntime_library

ROOT = Path(__file__).parents[2]


Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A script with its arguments, in this process, where what it imports and exports need be there only once."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def run(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")

    return run


def test_rounds_with_the_cores_near_each_other_are_told_from_the_others(run: Run) -> None:
    import side_by_side

    ms = np.array([3.0, 1.0, 1.2, 3.1, 1.1, 1.0, 1.3, 1.1, 1.2, 1.0])
    apart = np.where(ms > 2, 330.0, 55.0)
    found = side_by_side.cores_near(ms, apart, 50.0)
    assert found == {"far": pytest.approx(0.2), "near": {"rounds": 8, "median_ms": 1.1}}
    assert side_by_side.cores_near(ms[:8], apart[:8], 50.0) == {"far": 0.25}  # six rounds are no median
    assert side_by_side.cores_near(ms, apart * np.nan, np.nan) == {}


def test_every_script_finds_what_it_imports() -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert {"layouts", "shared_memory", "served", "cpu_settings"} <= set(names)  # no test below runs these
    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_engines_runs_and_reads_its_numbers_from_builds(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "engines.py"
    only = ["--family", "vit", "--precision", "fp16", "--mask", "gmm", "--no-head-dims"]
    command = [sys.executable, str(script), *only, "--output", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (vit,) = json.loads(out.read_text())["families"].values()
    assert {mask: (row["fp16"]["fused"], row["fp16"]["attentions"]) for mask, row in vit.items()} == {
        "gmm": (9, 9),
    }
    row = vit["gmm"]["fp16"]
    assert row["twin"]["kernels_more"] == 0
    assert row["unfolded"]["error"] >= row["unfolded"]["folded_error"] > 0


def test_parity_limits_runs_and_tells_right_from_wrong(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("parity_limits", "--model", "vit_plain", "--output", str(out))
    (row,) = json.loads(out.read_text())["models"].values()
    assert 0 < row["runner"]["largest"] < 8
    assert 0 < row["fp16"]["largest"] < 2
    assert {"LayerNorm with an epsilon of 1e-6", "1/√d missing", "channels in the order BGR"} <= set(
        row["mistakes_over_limit"]
    )
    assert min(row["mistakes_over_limit"].values()) > 1


def test_fastest_cpu_runs_and_checks_its_answers(run: Run, tmp_path: Path) -> None:
    from core_to_core import round_trip_ns

    run("fastest_cpu", "--rounds", "1", "--family", "vit", "--batch", "1", "--output", str(tmp_path))
    family = json.loads((tmp_path / "vit.json").read_text())
    rows = family["1"]
    assert {"eager", "straight export", "onnxruntime", "openvino", "openvino:int8"} <= rows.keys()
    for row in rows.values():
        assert 0 < row["off"] <= row["limit"]
        found = row["times_faster_than_eager"]
        assert found["low"] <= found["median"] <= found["high"]
        assert 0 <= row.get("far", 0) <= 1
        assert ("far" in row) == (round_trip_ns() is not None)
    assert family["mflop_an_image"] > 300
    assert all(0 < row["share_of_roofline"] < 1.2 for row in rows.values() if "share_of_roofline" in row)
    assert "share_of_roofline" in rows["openvino"]


def test_mask_cost_runs_and_checks_its_answers(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("mask_cost", "--loads", "2", "--family", "vit", "--batch", "1", "--output", str(out))
    rows = json.loads(out.read_text())["families"]["vit"]["1"]
    assert {"onnxruntime", "openvino"} <= rows.keys()
    for row in rows.values():
        assert 0 < row["off"] <= row["limit"]
        assert 0.5 < row["over_plain"]["low"] <= row["over_plain"]["median"] <= row["over_plain"]["high"] < 2


@pytest.mark.skipif(visible_gpu() is not None, reason="a GPU is here")
def test_fastest_gpu_measures_nothing_without_one(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "fastest_gpu.py"), "--output", str(out)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 1
    assert answer.stderr.startswith("a GPU was wanted that nvidia-smi and PyTorch both see, found none")
    assert not out.exists()


@pytest.mark.gpu
def test_fastest_gpu_runs_and_checks_its_answers(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "fastest_gpu.py"
    command = [sys.executable, str(script), "--rounds", "2", "--family", "vit", "--batch", "1", "--output", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    rows = json.loads((out / "vit.json").read_text())["1"]
    assert {"eager", "compile", "tensorrt", "tensorrt:fp16", "tensorrt:fp16 plain", "tensorrt:int8"} <= rows.keys()
    assert all(0 < row["off"] <= row["limit"] for row in rows.values())


def test_low_rank_runs(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("low_rank", "--rounds", "2", "--family", "vit", "--output", str(out))
    result = json.loads(out.read_text())
    least, median, most = result["ranks"]["vit"]["exact"]
    assert 1 <= least <= median <= most <= 64
    assert all(found["low"] > 0 for found in result["fused_over_masked"].values())
    assert result["card"]["verdict"] == ("INVALID" if result["card"]["reasons"] else "VALID")


def test_where_time_goes_accounts_for_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    programs = ("--program", "onnxruntime", "--program", "openvino")
    run("where_time_goes", "--runs", "3", "--family", "vit", *programs, "--output", str(out))
    found = json.loads(out.read_text())["families"]["vit"]["programs"]
    assert found.keys() == {"onnxruntime", "openvino"}
    for name, program in found.items():
        for rows, chunk in program["rows"].items():
            spent = chunk["spent_ms"]
            assert sum(spent.values()) == pytest.approx(chunk["ms"])
            assert min(spent["products"], spent["attention"], spent["norms"], spent["layout"]) > 0
            # It is inside our kernel; where there is none, inside OpenVINO's but not ONNX Runtime's.
            assert (spent["mask"] > 0) == (name == "onnxruntime" and onnxruntime_library()[0] is None)
            assert spent["rest"] < 0.3 * chunk["ms"]
            assert abs(chunk["mask_ms"]) < 0.5 * chunk["ms"]
            assert ("target" in chunk) == (rows != "1")


class TestRunCard:
    @pytest.fixture(autouse=True)
    def calm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        import run_card

        state = MachineState(load=0.1, others=0.0, stolen=0.0, spin_ms=1.0, megahertz=())
        monkeypatch.setattr(run_card, "machine_state", lambda: state)

    def card(self, path: Path, found: dict[str, float], *, timed: bool = True) -> dict[str, Any]:
        import run_card

        with run_card.written(path / "result.json", "script.py", timed=timed, rounds=3) as results:
            results["vit"] = {"1": {"over_plain": found}}
        card: dict[str, Any] = json.loads((path / "result.json").read_text())["card"]
        return card

    def test_a_calm_machine_and_narrow_intervals_are_valid(self, tmp_path: Path) -> None:
        card = self.card(tmp_path, {"median": 1.0, "low": 0.95, "high": 1.1})
        assert (card["verdict"], card["reasons"], card["settings"]) == ("VALID", [], {"rounds": 3})

    def test_a_ratio_that_says_nothing(self, tmp_path: Path) -> None:
        wide = {"median": 1.0, "low": 0.8, "high": 1.1}
        card = self.card(tmp_path, wide)
        assert card["verdict"] == "INVALID"
        assert card["reasons"] == ["unstable: vit, 1, over_plain: its interval is 30% of it wide"]
        assert self.card(tmp_path, wide, timed=False)["verdict"] == "VALID"

    def test_nothing_is_faster_than_the_hardware(self, tmp_path: Path) -> None:
        card = self.card(tmp_path, {"share_of_roofline": 1.02})
        assert card["reasons"] == ["unstable: vit, 1, over_plain: 102% of the roofline"]
        assert self.card(tmp_path, {"share_of_roofline": 0.98})["verdict"] == "VALID"

    def test_a_busy_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import run_card

        busy = MachineState(load=2.0, others=0.5, stolen=0.0, spin_ms=1.0, megahertz=())
        monkeypatch.setattr(run_card, "machine_state", lambda: busy)
        card = self.card(tmp_path, {"median": 1.0, "low": 1.0, "high": 1.0})
        assert card["verdict"] == "INVALID"
        assert "other programs took 50%" in card["reasons"][0]

    def test_nothing_is_written_after_an_error(self, tmp_path: Path) -> None:
        import run_card

        def fail() -> None:
            with run_card.written(tmp_path / "result.json", "script.py"):
                raise SystemExit("answers are wrong")

        with pytest.raises(SystemExit):
            fail()
        assert list(tmp_path.iterdir()) == []
