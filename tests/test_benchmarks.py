"""Benchmarks are run for their numbers elsewhere; here, that they run and say what they claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_engines_runs_and_reads_its_numbers_from_builds(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "engines.py"
    only = ["--family", "vit", "--precision", "fp16", "--mask", "gmm", "--mask", "plain", "--no-head-dims"]
    command = [sys.executable, str(script), *only, "--output", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (vit,) = json.loads(out.read_text())["families"].values()
    assert {mask: (row["fp16"]["fused"], row["fp16"]["attentions"]) for mask, row in vit.items()} == {
        "gmm": (9, 9),
        "plain": (9, 9),
    }
    row = vit["gmm"]["fp16"]
    assert row["twin"]["kernels_more"] == 0
    assert row["unfolded"]["error"] >= row["unfolded"]["folded_error"] > 0


def test_parity_limits_runs_and_tells_right_from_wrong(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "parity_limits.py"
    command = [sys.executable, str(script), "--model", "vit_plain", "--output", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (row,) = json.loads(out.read_text())["models"].values()
    assert 0 < row["runner"]["largest"] < 8
    assert 0 < row["fp16"]["largest"] < 2
    assert {"LayerNorm with an epsilon of 1e-6", "1/√d missing", "channels in the order BGR"} <= set(
        row["mistakes_over_limit"]
    )
    assert min(row["mistakes_over_limit"].values()) > 1


def test_fastest_cpu_runs_and_checks_its_answers(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "fastest_cpu.py"
    command = [sys.executable, str(script), "--rounds", "2", "--family", "vit", "--batch", "1", "--output", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (family,) = json.loads(out.read_text())["families"].values()
    rows = family["1"]
    assert {"eager", "straight export", "onnxruntime", "onnxruntime plain", "openvino", "openvino:int8"} <= rows.keys()
    for row in rows.values():
        assert 0 < row["off"] <= row["limit"]
        found = row["times_faster_than_eager"]
        assert found["low"] <= found["median"] <= found["high"]
    assert family["mflop_an_image"] > 300
    assert all(0 < row["share_of_roofline"] < 1.2 for row in rows.values() if "share_of_roofline" in row)


def test_low_rank_runs(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "low_rank.py"
    command = [sys.executable, str(script), "--rounds", "2", "--family", "vit", "--output", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    result = json.loads(out.read_text())
    least, median, most = result["ranks"]["vit"]["exact"]
    assert 1 <= least <= median <= most <= 64
    assert all(found["low"] > 0 for found in result["fused_over_masked"].values())
