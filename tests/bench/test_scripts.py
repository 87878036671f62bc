"""The benchmark scripts run, check their answers, and report what their docstrings state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.reported import masked_attention_gpu, where_time_goes
from benchmarks.reported.fastest_gpu import engines_of
from benchmarks.reported.first_output import START_AND_END
from benchmarks.settings import kernel_tails, one_image_openvino
from benchmarks.shared import cpu_programs, side_by_side
from benchmarks.shared.checkouts import opened_checkout
from benchmarks.shared.close_logits import require_close
from benchmarks.shared.families import as_released, eager
from benchmarks.shared.places import KINDS, ROOT, scripts
from benchmarks.shared.timm_architectures import ARCHITECTURES, Architecture, attention_effects
from benchmarks.tables import question
from gmmvit_cli.commands import SUMMARIES
from gmmvit_deploy.bench.core_to_core import round_trip_ns
from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.engines.flavors import visible_gpu
from gmmvit_deploy.families.cait.model import TalkingHeadsAttention
from gmmvit_deploy.layers.attention import MaskedAttention
from gmmvit_deploy.runtime.cores import cores
from tests.bench.conftest import NEEDS_KERNELS, Run
from tests.conftest import RELEASED, golden


def test_rounds_with_near_cores_are_separated_from_the_others() -> None:
    ms = np.array([3.0, 1.0, 1.2, 3.1, 1.1, 1.0, 1.3, 1.1, 1.2, 1.0])
    apart = np.where(ms > 2, 330.0, 55.0)
    shares = side_by_side.cores_near(ms, apart, 50.0)
    assert shares == {"far": pytest.approx(0.2), "near": {"rounds": 8, "median_ms": 1.1}}
    assert side_by_side.cores_near(ms[:8], apart[:8], 50.0) == {"far": 0.25}  # six rounds are no median
    assert side_by_side.cores_near(ms, apart * np.nan, np.nan) == {}


@pytest.mark.process
def test_every_script_finds_what_it_imports() -> None:
    names = [f"benchmarks.{path.parent.name}.{path.stem}" for kind in KINDS for path in scripts(kind)]
    assert {"rejected.layouts", "rejected.shared_memory", "reported.served", "settings.cpu_settings"} <= {
        name.removeprefix("benchmarks.") for name in names
    }  # no test below runs these
    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_list_of_scripts_has_every_script_with_its_command_and_its_question() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    rows = dict(re.findall(r"^\| `python benchmarks/(\w+/\w+)\.py[^`]*` \| (.*?) \|", page, re.MULTILINE))
    assert rows == {f"{kind}/{path.stem}": question(kind, path.stem) for kind in KINDS for path in scripts(kind)}


def test_make_bench_runs_every_script_that_needs_no_second_checkout() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = re.findall(r"\w+/\w+", re.search(r"^BENCHMARKS := (.*?[^\\])$", makefile, re.MULTILINE | re.DOTALL)[1])
    every = {f"{kind}/{path.stem}" for kind in KINDS for path in scripts(kind)}
    assert len(listed) == len(set(listed))
    gpu = {"reported/fastest_gpu", "reported/masked_attention_gpu"}
    assert set(listed) == every - {*gpu, "reported/before_after"}
    assert f"for script in {' '.join(sorted(Path(name).name for name in gpu))}; do" in makefile


@pytest.mark.parametrize("name", RELEASED)
def test_the_eager_baseline_gives_the_released_logits(name: str) -> None:
    released = golden(name)
    model = load_checkpoint(released.path, released.hints).model.eval()
    logits = eager(as_released(model))(released.inputs)
    if "avx512f" in cpu_features():
        np.testing.assert_array_equal(logits, released.logits)
    else:  # the released logits were computed with AVX-512: other instruction sets add in another order
        np.testing.assert_allclose(logits, released.logits, rtol=0, atol=released.atol)


@pytest.mark.parametrize(("name", "einsums"), [("vit", 2), ("pit", 2), ("cait", 4), ("swin", 0), ("t2t", 0)])
def test_the_eager_baseline_multiplies_as_the_released_code_of_the_family(name: str, einsums: int) -> None:
    released = golden(f"{name}_gmm")
    ours = load_checkpoint(released.path, released.hints).model.eval()
    attentions = sum(isinstance(part, MaskedAttention | TalkingHeadsAttention) for part in ours.modules())
    model = as_released(ours)
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.from_numpy(released.inputs[:1]))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert attentions > 0
    assert counts.get("aten::einsum", 0) == einsums * attentions


@pytest.mark.engine
@pytest.mark.process
@pytest.mark.matrix
def test_engines_runs_and_reads_its_numbers_from_builds(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "reported" / "engines.py"
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


@pytest.mark.export
def test_parity_limits_runs_and_separates_right_from_wrong(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("reported/parity_limits", "--model", "vit_plain", "--output", str(out))
    (row,) = json.loads(out.read_text())["models"].values()
    assert 0 < row["runner"]["largest"] < 8
    assert 0 < row["fp16"]["largest"] < 2
    assert {"LayerNorm with an epsilon of 1e-6", "1/√d missing", "channels in the order BGR"} <= set(
        row["mistakes_over_limit"]
    )
    assert min(row["mistakes_over_limit"].values()) > 1


@pytest.mark.parametrize("runner", cpu_programs.RUNNERS)
def test_a_plain_program_is_never_measured_as_ours(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gmmvit_deploy.runtime.onnxruntime.onnxruntime_library", lambda: (None, "no C++ compiler"))
    monkeypatch.setattr("gmmvit_deploy.runtime.openvino.openvino_library", lambda: (None, "no C++ compiler"))
    reason = rf"model\.onnx in {re.escape(runner.partition(':')[0])}.* cannot be measured: no C\+\+ compiler"
    with pytest.raises(SystemExit, match=reason):
        cpu_programs.cpu_program(tmp_path / "model.onnx", runner, cpu_programs.RUNNERS[runner])


FEW_PROGRAMS = ("straight export", "openvino+kernels")
PROGRAMS = (
    *FEW_PROGRAMS,
    "straight openvino",
    "onnxruntime+kernels",
    "openvino+kernels:bf16",
    "onnxruntime+kernels:int8",
    "openvino+kernels:int8",
)  # torch.compile takes a minute


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.parametrize("programs", [FEW_PROGRAMS, pytest.param(PROGRAMS, marks=pytest.mark.matrix)], ids=len)
def test_fastest_cpu_runs_and_checks_its_answers(programs: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    here = [name for name in programs if "bf16" not in name or cpu_programs.HAS_BF16]
    only = [argument for name in here for argument in ("--program", name)]
    run("reported/fastest_cpu", "--rounds", "1", "--family", "vit", "--batch", "1", *only, "--output", str(tmp_path))
    family = json.loads((tmp_path / "vit.json").read_text())
    rows = family["1"]
    assert rows.keys() == {"eager", *here}
    straight = {name for name in here if name.startswith("straight")}
    assert all(rows[name]["right"] for name in straight)
    for name in {"onnxruntime+kernels", "openvino+kernels"} & set(here):
        assert rows[name]["best_straight"] in straight
        assert rows[name]["times_faster_than_best_straight"]["median"] > 0
    for row in rows.values():
        assert 0 < row["off"] <= row["limit"]
        speed_up = row["times_faster_than_eager"]
        assert speed_up["low"] <= speed_up["median"] <= speed_up["high"]
        assert 0 <= row.get("far", 0) <= 1
        assert ("far" in row) == (round_trip_ns() is not None)
    assert family["mflop_an_image"] > 300
    assert all(0 < row["share_of_roofline"] < 1.2 for row in rows.values() if "share_of_roofline" in row)
    assert "share_of_roofline" in rows["openvino+kernels"]


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.process
@pytest.mark.matrix
def test_before_after_of_the_same_checkout(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "reported" / "before_after.py"
    only = ["--family", "vit", "--runtime", "onnxruntime", "--batch", "1", "--rounds", "1", "--loads", "1"]
    command = [sys.executable, str(script), "--before", str(ROOT), *only, "--output", str(out)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    (row,) = json.loads(out.read_text())["families"]["vit"]["onnxruntime+kernels"].values()
    assert answer.returncode == (row["verdict"] == "slower"), answer.stderr
    assert row["before_ms"] > 0
    assert row["control_over_before"]["median"] > 0
    assert row["verdict"] in answer.stdout


def test_before_after_names_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match="before: expected a checkout with the folder gmmvit_deploy/"),
        opened_checkout(tmp_path, "before"),
    ):
        pass


def test_other_logits_stop_before_after() -> None:
    right = np.array([[1.0, -2.0]])
    require_close({"before": right, "after": right + 1e-4}, right, "here")
    with pytest.raises(SystemExit, match=r"here: logits of after differ by 5\.0e-03"):
        require_close({"before": right, "after": right + 1e-2}, right, "here")
    with pytest.raises(SystemExit, match="expected logits"):
        require_close({"before": right, "after": right[:, :1]}, right, "here")


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.matrix
def test_mask_cost_runs_and_checks_its_answers(run: Run, tmp_path: Path) -> None:
    run("reported/mask_cost", "--loads", "2", "--family", "vit", "--batch", "1", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "vit.json").read_text())["1"]
    assert {"onnxruntime+kernels", "openvino+kernels"} <= rows.keys()
    for row in rows.values():
        assert 0 < row["off"] <= row["limit"]
        assert 0.5 < row["over_plain"]["low"] <= row["over_plain"]["median"] <= row["over_plain"]["high"] < 2


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.parametrize("script", ["fastest_cpu", "mask_cost"])
def test_check_compares_logits_and_writes_nothing(
    script: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ("--program" if script == "fastest_cpu" else "--runner", "onnxruntime+kernels")
    run(f"reported/{script}", "--check", "--family", "vit", "--batch", "1", *only, "--output", str(tmp_path))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "onnxruntime+kernels: " in line]
    off, limit = re.fullmatch(
        r"vit, batch 1, onnxruntime\+kernels: (.+) from PyTorch's float64 logits, limit (.+)", line
    ).groups()
    assert 0 < float(off) <= float(limit)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(visible_gpu() is not None, reason="a GPU is here")
@pytest.mark.process
def test_fastest_gpu_measures_nothing_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "reported" / "fastest_gpu.py"), "--output", str(out)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 1
    assert answer.stderr.startswith("nothing was measured: expected a GPU")
    assert not out.exists()


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.process
def test_fastest_gpu_runs_and_checks_its_answers(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "reported" / "fastest_gpu.py"
    command = [sys.executable, str(script), "--rounds", "2", "--family", "vit", "--batch", "1", "--output", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    rows = json.loads((out / "vit.json").read_text())["1"]
    engines = {"tensorrt", "tensorrt:fp16", "tensorrt:fp16 plain", "tensorrt:bf16", "tensorrt:int8"}
    assert {"eager", "eager:bf16", "eager:fp16", "compile", "compile:bf16", "compile:fp16", *engines} <= rows.keys()
    assert all(0 < row["off"] <= row["limit"] for row in rows.values())


def test_engines_of_a_gpu_have_fp8_where_the_gpu_has_it() -> None:
    family = SimpleNamespace(models={"trained": None, "plain": None})
    with_fp8, without = (engines_of(family, capability) for capability in ((8, 9), (8, 6)))  # type: ignore[arg-type]
    assert with_fp8 == [*without, ("tensorrt:fp8", "fp8", "fp8")]
    assert {precision for _, _, precision in without} == {"fp32", "fp16", "bf16", "int8"}
    assert ("tensorrt:fp16 plain", "plain_fp16", "fp16") in without


@pytest.mark.gpu
def test_masked_attention_on_a_gpu_runs_and_checks_its_outputs(run: Run, tmp_path: Path) -> None:
    run("reported/masked_attention_gpu", "--rounds", "2", "--output", str(tmp_path / "result.json"))
    rows = json.loads((tmp_path / "result.json").read_text())["attentions"]
    assert len(rows) == len(masked_attention_gpu.SHAPES) * len(masked_attention_gpu.TYPES)
    assert all(row["flex"]["over_plain"]["median"] > 0 for row in rows.values())


@pytest.mark.process
def test_masked_attention_of_a_gpu_is_checked_on_the_cpu(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("reported/masked_attention_gpu", "--check", "--device", "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(masked_attention_gpu.SMALL) * 4
    assert sum(": flex: off by" in line for line in lines) == len(masked_attention_gpu.SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_wrong_masked_attention_stops_the_script(dtype: torch.dtype) -> None:
    shape = masked_attention_gpu.Shape(4, 2, 64, 16)
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    mask = masked_attention_gpu.mask_of(shape).to(dtype)
    right = {"flex": lambda: masked_attention_gpu.by_operators(*inputs, mask)}
    assert masked_attention_gpu.differences(right, inputs, mask)["flex"] >= 0  # type: ignore[arg-type]
    wrong = {"flex": lambda: masked_attention_gpu.by_operators(*inputs, torch.ones_like(mask))}
    with pytest.raises(SystemExit, match="flex: the outputs differ by"):
        masked_attention_gpu.differences(wrong, inputs, mask)  # type: ignore[arg-type]


@NEEDS_KERNELS
@pytest.mark.process
def test_sizes_that_fill_no_vector_are_compared_with_padding_in_every_instruction_set(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("settings/kernel_tails", "--rounds", "2", "--output", str(out))
    sets = json.loads(out.read_text())["sets"]
    assert {"avx2", "neon"} & sets.keys()
    assert ("avx512" in sets) == ("avx512f" in cpu_features())
    for rows in sets.values():
        assert rows.keys() == kernel_tails.SIZES.keys()
        assert all(0 < row["off"] < 1e-4 and row["as_it_is_over_padded"]["low"] > 0 for row in rows.values())
    assert sets[next(iter(sets))]["197 tokens"]["padded_to"] == "208 tokens, head dim 64"


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.process
def test_settings_of_openvino_are_compared_for_a_single_image(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    only = ("--family", "vit", "--precision", "fp32", "--rounds", "2")
    run("settings/one_image_openvino", *only, "--output", str(out))
    rows = json.loads(out.read_text())["families"]["vit"]["fp32"]
    assert rows.keys() == {*one_image_openvino.SETTINGS, one_image_openvino.OTHER_SNIPPETS}
    assert all(row["ms"] > 0 for row in rows.values())
    runner, alone = rows["runner"]["ms"], rows["one thread"]["ms"]
    assert rows["one thread"]["bound"]["median"] == pytest.approx(cores() * runner / alone, rel=0.5)


@pytest.mark.process
def test_startup_measures_the_help_of_every_command(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("reported/startup", "--rounds", "1", "--output", str(out))
    rows = json.loads(out.read_text())["programs"]
    controls = {"import typer, rich", "typer command with one option --help"}
    assert rows.keys() == {*controls, "gmmvit --help", *(f"gmmvit {name} --help" for name in SUMMARIES)}
    assert all(row["ms"] > 0 and row["over_bare"]["low"] > 0 for row in rows.values())


@pytest.mark.process
def test_first_output_divides_a_command_into_parts(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    commands = ("classify", "export", "parity")
    only = [word for name in commands for word in ("--only", name)]
    run("reported/first_output", "--rounds", "1", *only, "--output", str(out))
    rows = {name: json.loads(out.read_text())["commands"][name]["after"] for name in commands}
    parts = rows["classify"]["parts"]
    assert {"imports", "rest", "sessions of ONNX Runtime", "inference", "digests", START_AND_END} <= parts.keys()
    assert {"exporter", "imports by the exporter", "compilations of OpenVINO"} <= rows["export"]["parts"].keys()
    for name, row in rows.items():
        in_process = sum(seconds for part, seconds in row["parts"].items() if part != START_AND_END)
        assert 0.3 * row["seconds"] < in_process <= row["seconds"], name
        assert min(row["parts"].values()) >= 0, name
        assert row["repeated"] == {}, f"gmmvit {name} computes the same twice"


@pytest.mark.export
def test_timm_models_runs_and_checks_its_answers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Architecture(size=64, args={"img_size": 64, "depth": 2})
    monkeypatch.setitem(ARCHITECTURES, "test_vit3", small)
    run("reported/timm_models", "--model", "test_vit3", "--rounds", "2", "--output", str(tmp_path))
    row = json.loads((tmp_path / "test_vit3.json").read_text())
    assert row["nodes"] < row["straight_nodes"]
    assert row["difference"].keys() == {"1", "2", "3", "8"}
    assert 0 < max(row["difference"].values()) <= row["limit"]
    assert row["softmaxes"] == 3  # two blocks and the pooling
    assert row["least_effect"] > 100
    assert row["fused"] + sum(row["reasons"].values()) == 3
    assert all(0 < half["distance"] <= half["limit"] for half in row["precisions"].values())
    speed = json.loads((tmp_path / "test_vit3.speed.json").read_text())["batches"]
    assert speed.keys() == {"1", "8"}
    for times in speed.values():
        ratio = times["times_faster_than_straight_export"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert 0 < max(times["off"]) <= times["limit"]


def test_attention_effects_are_zero_for_equal_weights() -> None:
    class Attention(torch.nn.Module):
        """Multiplies random values by a softmax of zeros, which is the same for all keys, and by an uneven softmax."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (0 * x).softmax(-1) @ x + torch.softmax(x, dim=-1) @ x

    effects = attention_effects(Attention(), torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0)))
    assert len(effects) == 2
    assert effects[0] < 1e-6 < 0.1 < effects[1]


def test_low_rank_runs(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run("rejected/low_rank", "--rounds", "2", "--family", "vit", "--output", str(out))
    result = json.loads(out.read_text())
    least, median, most = result["ranks"]["vit"]["exact"]
    assert 1 <= least <= median <= most <= 64
    assert all(relative["low"] > 0 for relative in result["fused_over_masked"].values())
    assert result["card"]["verdict"] == ("INVALID" if result["card"]["reasons"] else "VALID")


@pytest.mark.parametrize(
    ("node", "operator", "kind"),
    [
        ("blocks.0.attention/Reshape.3", "Reference", "attention"),
        ("stages.0.blocks.0.retention/Reshape", "Reference", "attention"),
        ("blocks.0.attention_norm/LayerNormalization", "Reference", "norms"),
        ("MVN_27", "MVN", "norms"),
        ("blocks.0.attention/Transpose", "Transpose", "layout"),
        ("blocks.0.mlp.0/Add", "FullyConnected", "products"),
    ],
)
def test_where_time_goes_names_our_operations_by_their_type(node: str, operator: str, kind: str) -> None:
    assert where_time_goes.kind_of(node, operator) == kind


@NEEDS_KERNELS
@pytest.mark.export
def test_where_time_goes_accounts_for_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    programs = ("--program", "onnxruntime+kernels", "--program", "openvino+kernels")
    run("reported/where_time_goes", "--runs", "3", "--family", "vit", *programs, "--output", str(out))
    by_program = json.loads(out.read_text())["families"]["vit"]["programs"]
    assert by_program.keys() == {"onnxruntime+kernels", "openvino+kernels"}
    for program in by_program.values():
        for rows, chunk in program["rows"].items():
            spent = chunk["spent_ms"]
            assert sum(spent.values()) == pytest.approx(chunk["ms"])
            assert min(spent["products"], spent["attention"], spent["norms"], spent["layout"]) > 0
            assert spent["mask"] == 0  # it is inside our kernel
            assert spent["rest"] < 0.3 * chunk["ms"]
            assert abs(chunk["mask_ms"]) < 0.5 * chunk["ms"]
            assert ("target" in chunk) == (rows != "1")


@NEEDS_KERNELS
@pytest.mark.export
@pytest.mark.matrix
def test_where_time_goes_of_a_system_without_plain_twin_and_without_kernels(run: Run, tmp_path: Path) -> None:
    """Our kernels compute no part of EANet, and EANet has no plain twin."""
    systems = ("--family", "eanet", "--systems-output", str(tmp_path), "--output", str(tmp_path / "families.json"))
    run("reported/where_time_goes", "--runs", "2", *systems, "--program", "openvino+kernels")
    result = json.loads((tmp_path / "eanet.json").read_text())
    assert not (tmp_path / "families.json").exists()
    assert result["size"].startswith("preset ")
    (name,) = result["families"]["eanet"]["programs"]
    assert name == "openvino"
    for chunk in result["families"]["eanet"]["programs"][name]["rows"].values():
        assert sum(chunk["spent_ms"].values()) == pytest.approx(chunk["ms"])
        assert "mask_ms" not in chunk
