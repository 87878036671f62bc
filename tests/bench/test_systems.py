"""The systems of the benchmarks: what they are, their plain twins, and the comparison with straight programs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from benchmarks.reported import mask_cost
from benchmarks.shared import cpu_programs, side_by_side
from benchmarks.shared.families import as_released, compiled, eager
from benchmarks.shared.results import cross_of
from benchmarks.shared.straight_export import straight_graph
from benchmarks.shared.systems import MEASURED, SYSTEMS, system_pair
from benchmarks.shared.tables_costs import COSTS, cost_table
from benchmarks.shared.tables_engines import every_engine, systems_table
from benchmarks.shared.tables_reported import best_straight_table, fastest_table, headline_table, mask_free_table
from gmmvit_deploy.bench import products
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.families import FAMILIES, PRESETS, family_named, model_from_spec
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.kernels.libraries import onnxruntime_library
from gmmvit_deploy.runtime.onnxruntime import session_from_bytes
from gmmvit_deploy.runtime.onnxruntime_program import OnnxRuntimeProgram
from gmmvit_deploy.runtime.openvino_program import OpenVinoProgram
from gmmvit_deploy.scores.attention import attention_scores
from gmmvit_deploy.specs import MaskSpec, input_shape

NEEDS_KERNELS = pytest.mark.skipif(onnxruntime_library()[0] is None, reason="our kernels are not available here")
WITH_TWIN = [name for name, system in SYSTEMS.items() if system.plain is not None]
STEPS_OF_TWINS_ONLY = {"before.scale"}
RATIO = {"median": 1.5, "low": 1.4, "high": 1.6}


def test_every_family_with_a_fixed_size_is_measured() -> None:
    # naive_vit and hugging_face have no preset, and timm_models.py measures timm.
    without_size = {"naive_vit", "timm", "hugging_face"}
    measured = {SYSTEMS[name].spec.family if name in SYSTEMS else name for name in MEASURED}
    assert measured == {family.name for family in FAMILIES} - without_size
    assert {f"{family.name}_spt_lsa" for family in FAMILIES if "spt-lsa" in family.variants()} <= SYSTEMS.keys()


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_states_its_size(name: str) -> None:
    system = SYSTEMS[name]
    assert system.preset in PRESETS
    side, timed_side = system.spec.image_size, system.timed_spec.image_size
    assert system.full_size == f"preset {system.preset}, {side}×{side}"
    assert f"{timed_side}×{timed_side}" in system.size
    assert (f"in place of {side}×{side}" in system.size) == (timed_side != side)
    assert ("in place of" in system.size) == bool(system.shortened) == (system.timed_spec != system.spec)
    for name in system.shortened.keys() & {"depth", "depths"}:
        assert f"{name} {getattr(system.timed_spec, name)} in place of {getattr(system.spec, name)}" in system.size


def test_mask_cost_measures_the_models_with_a_plain_twin() -> None:
    assert set(MEASURED) - set(mask_cost.MODELS) == {"deepvit", "eanet", "vit_pytorch_deepvit"}


@pytest.mark.parametrize("name", WITH_TWIN)
def test_a_plain_twin_has_the_same_weights_and_no_constants_on_the_scores(name: str) -> None:
    models = system_pair(name)
    trained, plain = models["trained"], models["plain"]
    state = trained.state_dict()
    assert all(tensor.equal(state[key]) for key, tensor in plain.state_dict().items())
    left_out = {key for key in state if key not in plain.state_dict()}
    assert left_out
    assert all(".scores.before." in key for key in left_out)
    steps = dict(attention_scores(plain))
    for attention, scores in attention_scores(trained):
        own, of_twin = ({step for step, _ in each.steps()} for each in (scores, steps[attention]))
        assert own - of_twin, attention
        assert of_twin - own <= STEPS_OF_TWINS_ONLY, attention
    images = torch.randn(2, *input_shape(trained.spec), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert not torch.allclose(trained(images), plain(images), atol=1e-4)
    temperatures = [tensor for key, tensor in state.items() if key.endswith(".temperature") and tensor.numel() > 1]
    assert all(len(tensor.unique()) == tensor.numel() for tensor in temperatures)  # each head has its own temperature


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name.endswith("_spt_lsa")])
def test_the_form_of_the_authors_code_computes_the_same_logits(name: str) -> None:
    model = system_pair(name)["trained"]
    images = np.random.default_rng(0).standard_normal((2, *input_shape(model.spec)), dtype=np.float32)
    np.testing.assert_allclose(eager(as_released(model))(images), eager(model)(images), rtol=1e-4, atol=1e-4)


def family_with(**fields: Any) -> Any:
    return SimpleNamespace(straight={"fast", "slow", "half"}, **fields)


def test_the_best_straight_program_has_right_logits_and_the_same_precision() -> None:
    family = family_with(precision={"fast": "fp32", "slow": "fp32", "half": "bf16", "ours": "fp32"})
    times = {name: np.full(8, ms) for name, ms in {"fast": 1.0, "slow": 3.0, "half": 0.5, "ours": 0.2}.items()}
    right = {name: {"off": 1.0, "limit": 2.0} for name in times}
    assert side_by_side.best_straight(family, times, "fp32", right) == "fast"
    for off in (3.0, np.nan):
        wrong = {**right, "fast": {"off": off, "limit": 2.0}}
        assert side_by_side.best_straight(family, times, "fp32", wrong) == "slow"
    assert side_by_side.best_straight(family, times, "bf16", right) == "half"
    assert side_by_side.best_straight(family, times, "int8", right) is None


def test_wrong_logits_stop_the_script_unless_the_program_is_straight() -> None:
    images = np.zeros((1, 2), np.float32)
    limits = (images, SimpleNamespace(largest=0.5))
    programs = {name: [lambda batch: batch + 1] for name in ("fast", "ours")}
    family = family_with(programs=programs, limits=lambda name, batch: limits)
    assert side_by_side.checked(family, {"fast": images}, images) == {"fast": {"off": 1.0, "limit": 0.5}}
    with pytest.raises(SystemExit, match="ours: the logits differ by 1"):
        side_by_side.checked(family, {"ours": images}, images)


@pytest.mark.export
def test_a_network_without_roles_before_folding_has_a_straight_graph() -> None:
    """The graph needs no declared roles, which RMT's rotation and decays get only by folding."""
    model = model_from_spec(family_named("rmt").small(MaskSpec(kind="decay"))).eval()
    session = session_from_bytes(straight_graph(model, input_shape(model.spec), 4).SerializeToString(), "straight")
    for batch in (1, 3):
        images = torch.randn(batch, *input_shape(model.spec))
        (logits,) = session.run(None, {"tensor": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(images), atol=1e-4, rtol=1e-4)


def test_the_matrix_product_of_a_roofline_reads_its_own_copy_of_the_input() -> None:
    shape = (2048, 512, 64)
    program = products._openvino("f32")(shape)
    (product,) = program().values()  # type: ignore[union-attr]  # Program returns object
    left = np.random.default_rng(1).standard_normal(shape[:2], dtype=np.float32)
    right = np.random.default_rng(0).standard_normal(shape[1:], dtype=np.float32)
    np.testing.assert_allclose(product, left @ right, atol=1e-3)


def test_logits_of_a_copy_that_are_not_finite_stop_the_script() -> None:
    images = np.zeros((1, 2), np.float32)
    copies = [np.copy, lambda batch: np.full_like(batch, np.nan), np.copy]
    family = family_with(programs={"ours": copies}, limits=lambda name, batch: (images, SimpleNamespace(largest=0.5)))
    with pytest.raises(SystemExit, match="ours: the logits differ by nan"):
        side_by_side.checked(family, {"ours": images}, images)


def test_a_straight_program_that_cannot_run_is_recorded_with_its_reason() -> None:
    family = object.__new__(side_by_side.Family)
    family.programs, family.precision, family.straight = {}, {}, set()
    family.missing, family.known, family.only = {}, [], ["broken", "right"]

    def broken() -> Any:
        raise ExportError("no graph\nsecond line")

    family.add_straight("broken", broken, "fp32")
    family.add_straight("right", lambda: np.copy, "fp32")
    family.add_straight("not asked for", broken, "fp32")
    assert family.missing == {"broken": "ExportError: no graph"}
    assert family.straight == set(family.programs) == {"right"}
    assert family.known == ["broken", "right", "not asked for"]


def test_a_straight_program_that_fails_at_a_batch_is_recorded_with_its_reason() -> None:
    def only_single(batch: np.ndarray) -> np.ndarray:
        if len(batch) > 1:
            raise RuntimeError("the batch is fixed\nsecond line")
        return batch

    family = object.__new__(side_by_side.Family)
    family.image_shape, family.missing = (3, 2, 2), {}
    family.programs = {"ours": [np.copy], "straight": [only_single]}
    family.straight = {"straight"}
    assert family.runnable(1) == family.programs
    assert family.missing == {}
    assert family.runnable(64) == {"ours": [np.copy]}
    assert family.missing == {"straight, batch 64": "RuntimeError: the batch is fixed"}
    family.straight = set()
    with pytest.raises(RuntimeError, match="the batch is fixed"):
        family.runnable(64)


def test_results_without_rooflines_have_times_and_no_shares() -> None:
    weight = onnx.numpy_helper.from_array(np.ones((4, 2), np.float32), "weight")
    entry, out = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", *shape])
        for name, shape in (("tensor", (1, 1, 4)), ("logits", (1, 1, 2)))
    )
    node = onnx.helper.make_node("MatMul", ["tensor", "weight"], ["logits"], name="product")
    graph = onnx.helper.make_graph([node], "graph", [entry], [out], [weight])
    family = object.__new__(side_by_side.Family)
    family.image_shape, family.straight, family.missing, family.without_kernels = (1, 1, 4), set(), {}, {}
    family.graphs = {"trained": onnx.helper.make_model(graph)}
    family.programs = {name: [lambda images: images[:, 0, 0, :2] * 4] for name in ("eager", "ours")}
    family.precision = {"eager": "fp32", "ours": "fp32"}
    family.limits = lambda name, images: (images[:, 0, 0, :2] * 4, SimpleNamespace(largest=0.5))  # type: ignore[method-assign]
    results = side_by_side.measured(family, "vit", (64,), 1, "cpu", with_roofline=False)
    assert results["roofline"] == {}
    assert results["64"].keys() == {"eager", "ours"}
    for row in results["64"].values():
        assert row["median_ms"] > 0
        assert row["off"] == 0
        assert "share_of_roofline" not in row


@pytest.mark.process
def test_a_compiled_program_computes_the_logits_of_the_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.GELU()).eval()
    images = np.random.default_rng(0).standard_normal((3, 3, 2, 2), dtype=np.float32)
    run = compiled(module, (3, 2, 2))
    np.testing.assert_allclose(run(images), eager(module)(images), atol=1e-6)
    half = compiled(module, (3, 2, 2), precision="bf16")(images)
    assert half.dtype == np.float32
    assert 0 < np.abs(half - eager(module)(images)).max() < 0.05


def saved(family: str, mask: MaskSpec, folder: Path) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = model_from_spec(family_named(family).small(mask)).eval()
    path = folder / f"{family}.onnx"
    onnx.save(onnx_from_model(fold(model).model, preprocessing=None, max_batch=4), path)
    return model, path


@NEEDS_KERNELS
@pytest.mark.export
def test_a_runner_without_work_for_our_kernels_is_measured_without_them(tmp_path: Path) -> None:
    _, path = saved("eanet", MaskSpec(), tmp_path)
    name, reason = cpu_programs.runner_of(path, "onnxruntime+kernels", "fp32")
    assert name == "onnxruntime"
    assert reason.startswith("our kernel takes no attention of this graph")
    model, path = saved("vit", MaskSpec(kind="gmm", kernels=2), tmp_path)
    assert cpu_programs.runner_of(path, "onnxruntime+kernels", "fp32") == ("onnxruntime+kernels", "")
    run = cpu_programs.straight_openvino(path, "fp32")
    spec: Any = model.spec
    for batch in (1, 3):
        images = np.random.default_rng(batch).standard_normal((batch, *input_shape(spec)), dtype=np.float32)
        np.testing.assert_allclose(run(images), eager(model)(images), rtol=1e-4, atol=1e-4)


@NEEDS_KERNELS
@pytest.mark.export
def test_a_program_runs_in_the_runtime_of_its_name(tmp_path: Path) -> None:
    _, path = saved("vit", MaskSpec(kind="gmm", kernels=2), tmp_path)
    for runtime, kind in (("onnxruntime", OnnxRuntimeProgram), ("openvino", OpenVinoProgram)):
        for runner in (runtime, f"{runtime}+kernels"):
            for name in (runner, f"{runner}:int8"):
                program: Any = cpu_programs.cpu_program(path, name, "fp32")
                assert isinstance(program.__self__, kind), name
    with pytest.raises(KeyError):
        cpu_programs.cpu_program(path, "straight export", "fp32")


def test_a_kernel_that_is_not_available_stops_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_programs, "onnxruntime_library", lambda: (None, "no C++ compiler"))
    with pytest.raises(SystemExit, match=r"model\.onnx in onnxruntime\+kernels cannot be measured: no C\+\+ compiler"):
        cpu_programs.runner_of(tmp_path / "model.onnx", "onnxruntime+kernels", "fp32")


def speed(**fields: Any) -> dict[str, Any]:
    return {"median_ms": 2.0, "precision": "fp32", "times_faster_than_eager": RATIO, **fields}


def test_tables_show_systems_with_missing_rows() -> None:
    rows = {
        "eager": speed(),
        "torch.compile": speed(right=False),
        "straight export": speed(right=True),
        "onnxruntime": speed(without_kernels="no attention", best_straight="straight export")
        | {"times_faster_than_best_straight": RATIO},
    }
    missing = {"straight openvino": "no graph", "torch.compile:bf16, batch 64": "no compiler"}
    results = {"eanet": {"size": "preset T2t_vit_7, 224×224", "missing": missing, "1": rows}}
    head, _, row = fastest_table(results).splitlines()
    assert "torch.compile, ×" in head
    assert row.startswith("| eanet, 1 | 2.0 | wrong logits | 1.50 (1.40–1.60) | 1.50 (1.40–1.60), no kernels |")
    assert head.count("|") == row.count("|")
    head, line, row = best_straight_table(results).splitlines()
    assert head.count("|") == line.count("|") == row.count("|")
    assert row == (
        "| eanet, 1 | preset T2t_vit_7, 224×224 | straight export |  | 1.50 (1.40–1.60), no kernels |  |  "
        "| torch.compile: wrong logits; straight openvino: does not run |"
    )
    assert best_straight_table({"vit": {"1": {"eager": speed()}}}) == ""
    assert len(headline_table(results, {}).splitlines()) == 2
    costs = {"rmt": {"64": {"onnxruntime+kernels": {"over_plain": RATIO}}}}
    lines = mask_free_table(results, costs).splitlines()
    assert [line.partition(" |")[0] for line in lines[2:]] == ["| eanet, 1", "| rmt, 64"]
    assert "1.500 (1.400–1.600)" in lines[3]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("reason", "batches"),
    [
        (
            "unstable: 64, eager, times_faster_than_eager: the interval spans 28% of the ratio, expected at most 25%",
            "64",
        ),
        ("load: other programs used the machine", "1 64"),
    ],
)
def test_a_cross_marks_the_batches_whose_times_are_invalid(reason: str, batches: str) -> None:
    card = {"verdict": "INVALID", "reasons": [reason]}
    marked = [batch for batch in ("1", "64") if cross_of({"card": card}, batch)]
    assert marked == batches.split()
    assert cross_of({"card": {"verdict": "VALID", "reasons": []}}, "1") == cross_of({}, "1") == ""
    rows = {"1": {"eager": speed()}, "64": {"eager": speed()}, "card": card}
    assert [" †" in line for line in fastest_table({"rmt": rows}).splitlines()[2:]] == [
        b in marked for b in ("1", "64")
    ]


def test_tables_of_engines_show_systems_with_missing_precisions() -> None:
    row = {
        "layers": 9, "kernels": 7, "attentions": 2, "fused": 1, "why_not": ["a reason"], "misses": 0,
        "bytes": 2**20, "build_seconds": 1.0,
    }  # fmt: skip
    systems = {
        "rmt": {"preset": "preset RMT_T3, 224×224", "precisions": {"fp16": {**row, "twin": {"kernels_more": 3}}}},
        "eanet": {"preset": "preset T2t_vit_7, 224×224", "precisions": {"fp32": row}},
    }
    head, _, first, second = systems_table(systems).splitlines()
    assert head.count("|") == first.count("|") == second.count("|")
    assert first == "| rmt | preset RMT_T3, 224×224 | 1 of 2 | a reason |  | 7 | 1.0 | 3 |"
    assert second == "| eanet | preset T2t_vit_7, 224×224 |  |  | 7 |  |  |  |"
    card = {"settings": {"flavor": "f", "capability": "8.9"}, "cores": 2, "cpu": "c", "load_before": 0, "load_after": 0}
    page = every_engine({"card": card, "families": {}}, systems)
    assert "| rmt | fp16 | 9 | 7 | 1 of 2 | a reason | 0 | 1.00 | 1.0 |" in page
    assert "systems" not in every_engine({"card": card, "families": {}}, {})


def test_every_system_has_a_table_of_costs_on_its_page() -> None:
    assert sorted(name for names in COSTS.values() for name in names) == sorted(SYSTEMS)
    pages = Path(__file__).parents[2] / "docs" / "pages" / "models"
    for marker in COSTS:
        assert f"<!-- {marker} -->" in (pages / f"{marker.removeprefix('cost_')}.md").read_text(encoding="utf-8")


def test_a_table_of_costs_states_times_ratios_and_the_cost_of_the_constants() -> None:
    ours = speed(best_straight="straight export", times_faster_than_best_straight=RATIO, share_of_roofline=0.5)
    rows = {"eager": speed(), "straight export": speed(), "onnxruntime+kernels": ours, "openvino": ours}
    rows["openvino"] = {**ours, "without_kernels": "no attention"}
    twins = {"openvino+kernels": {"over_plain": RATIO}}
    head, line, row = cost_table(("rmt",), {"rmt": {"1": rows}}, {"rmt": {"1": twins}}).splitlines()
    assert row == (
        "| rmt, 1 | 2.0 | 2.00 | 2.00 (1.50 ×) | 2.00 (1.50 ×), no kernels |  |  | 50% | 1.500 (1.400–1.600) |"
    )
    assert head.count("|") == line.count("|") == row.count("|")
    assert cost_table(("eanet",), {}, {}) == "No result has these times yet."
