"""Which runner is taken for a bundle on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.choices import CHOICES_FILE, Machine, read_choices
from gmmvit_deploy.exporting.fastest import record_fastest
from gmmvit_deploy.runtimes.programs import openvino as openvino_settings
from gmmvit_deploy.runtimes.runners.chosen import choose_runner, this_machine
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier
from gmmvit_deploy.runtimes.runners.open import fastest_runner
from tests.choices import chosen_bundle


def test_the_best_that_passed_is_taken(precise_bundle: Bundle, tmp_path: Path) -> None:
    """In place of the usual runner; ``--runner`` wins."""
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", "openvino")
    chosen = choose_runner(bundle)
    assert (str(chosen.runner), chosen.notes) == ("onnxruntime:fp16", ())
    with BundleClassifier(bundle) as classifier:
        assert (classifier.runner, classifier.bundle) == ("onnxruntime:fp16", bundle.sha256)
    with BundleClassifier(bundle, runner="openvino") as classifier:
        assert classifier.runner == "openvino"


def test_a_machine_that_lacks_the_best_takes_the_next_and_says_so(
    precise_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "openvino:bf16", "onnxruntime:fp16")
    monkeypatch.setattr(openvino_settings, "find_spec", lambda name: None)
    chosen = choose_runner(bundle)
    assert str(chosen.runner) == "onnxruntime:fp16"
    (note,) = chosen.notes
    assert "openvino:bf16 is not used" in note
    assert "pip install 'gmmvit-deploy[openvino]'" in note


def test_a_graph_that_was_written_again_is_not_taken(precise_bundle: Bundle, tmp_path: Path) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", graph_sha256="0" * 64)
    chosen = choose_runner(bundle)
    assert str(chosen.runner) == fastest_runner(bundle)[0]
    assert any("fp16.onnx is not the graph that was judged" in note for note in chosen.notes)


def test_a_choice_that_was_judged_with_other_versions_says_so(precise_bundle: Bundle, tmp_path: Path) -> None:
    versions = {"onnxruntime": "1.0.0", "openvino": "1"}  # ONNX Runtime loads one of them
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", versions=versions)
    chosen = choose_runner(bundle)
    (note,) = chosen.notes
    assert str(chosen.runner) == "onnxruntime:fp16"
    assert "onnxruntime:fp16 was judged with other versions: onnxruntime 1.0.0 → " in note
    assert "openvino" not in note
    assert f"type gmmvit optimize {bundle.path}" in note


def test_neither_another_machine_nor_a_damaged_file_decides(precise_bundle: Bundle, tmp_path: Path) -> None:
    machine = Machine(cpu="another", cores=this_machine().cores)
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", machine=machine)
    usual = fastest_runner(bundle)[0]
    chosen = choose_runner(bundle)
    assert (str(chosen.runner), chosen.measured) == (usual, False)
    assert f"has no choice for this kind of machine, {this_machine()}, only for {machine}" in chosen.notes[0]
    (bundle.path / CHOICES_FILE).write_text("{")
    chosen = choose_runner(bundle)
    assert str(chosen.runner) == usual
    assert f"{CHOICES_FILE} is not used" in chosen.notes[0]


def test_export_records_the_float32_programs_that_it_proved(bundle: Bundle, tmp_path: Path) -> None:
    copied = chosen_bundle(bundle, tmp_path / "b")
    choice = record_fastest(copied)
    assert choice is not None
    assert read_choices(copied.path) == ((choice,), "")
    proven = {name for name in ("onnxruntime", "openvino", "openvino+kernels") if _proven(copied, name)}
    assert {str(candidate.runner) for candidate in choice.passed} == proven
    assert choose_runner(copied).runner == choice.passed[0].runner


def _proven(bundle: Bundle, name: str) -> bool:
    return f"{name}_largest_abs" in bundle.manifest.export_parity
