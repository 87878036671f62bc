"""convert returns projections of an int8 graph to more exact forms until a gate holds, and all after it knows them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from tests.cli.terminal import Answer, gmmvit_here, refused

GPU, CPU, RECORD = "graphs/int8.onnx", "graphs/int8-mixed.onnx", "graphs/int8-mixed.json"
DB = "53"
"""3 dB more than int8 gives on this bundle, and less than it gives with one projection in int8."""


@pytest.fixture(scope="module")
def converted(
    bundle: Bundle, calibration_images: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Answer]:
    path = tmp_path_factory.mktemp("mixed") / "bundle"
    shutil.copytree(bundle.path, path)
    answer = gmmvit_here("convert", path, "--precision", "int8", "--calibration", calibration_images, "--snr-db", DB)
    assert answer.status == 0, answer.err
    return open_bundle(path), answer


def record_of(bundle: Bundle) -> dict:
    return json.loads((bundle.path / RECORD).read_text())


@pytest.mark.nightly
def test_products_return_until_the_gate_holds(converted: tuple[Bundle, Answer]) -> None:
    calibration = record_of(converted[0])["calibration"]
    recipe, curve = calibration["recipe"], calibration["curve"]
    left = [*recipe["dynamic"], *recipe["float32"]]
    returns = [row["dynamic"] + 2 * row["float32"] for row in curve]  # every projection is a matrix product
    chosen = len(recipe["dynamic"]) + 2 * len(recipe["float32"])
    of_returns = dict(zip(returns, curve, strict=True))
    assert 0 < len(left) <= calibration["projections"]
    assert of_returns[chosen]["db"] >= float(DB)
    assert of_returns[chosen - 1]["db"] < float(DB)
    assert returns[0] == 0
    assert all(row["time"] > 0 for row in curve)
    assert {one["projection"]: one["form"] for one in calibration["moved"]} == {
        **dict.fromkeys(recipe["dynamic"], "dynamic"),
        **dict.fromkeys(recipe["float32"], "float32"),
    }
    assert all(one["error_share"] > 0 for one in calibration["moved"])
    assert calibration["gate_images"] == calibration["images"] // 2
    assert calibration["machine"]


@pytest.mark.nightly
def test_parity_knows_the_products_that_returned(converted: tuple[Bundle, Answer], tmp_path: Path) -> None:
    coarse = np.random.default_rng(6).integers(0, 256, (16, 4, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=coarse.repeat(8, axis=1).repeat(8, axis=2))
    shutil.copytree(converted[0].path, tmp_path / "b")
    words = ("parity", tmp_path / "b", "--runner", "openvino:int8", "--data", f"array:{tmp_path / 'x.npz'}", "--json")
    checks = json.loads(gmmvit_here(*words).out)["runners"][0]["checks"]
    calibration = next(check for check in checks if check["name"] == "calibration")
    assert calibration["verdict"] == "passed", calibration["reasons"]
    record = record_of(converted[0])
    forgotten = record["calibration"]["recipe"]["dynamic"].pop()
    (tmp_path / "b" / RECORD).write_text(json.dumps(record))
    checks = json.loads(gmmvit_here(*words).out)["runners"][0]["checks"]
    calibration = next(check for check in checks if check["name"] == "calibration")
    assert any(f"expected the node QuantizeLinear {forgotten}/" in why for why in calibration["reasons"])


@pytest.mark.integration
@pytest.mark.nightly
def test_tensorrt_takes_the_products_in_their_types(converted: tuple[Bundle, Answer], tmp_path: Path) -> None:
    path = converted[0].path
    words = ("--precision", "int8", "--compute-capability", "8.9", "--require-fused", "--require-precision")
    answer = gmmvit_here("build", path, *words, "-o", tmp_path / "engine", "--json")
    assert answer.status == 0, answer.err
    assert json.loads(answer.out)["card"]["misses"] == []


@pytest.mark.nightly
def test_a_gate_that_only_float32_holds_writes_nothing(
    converted: tuple[Bundle, Answer], calibration_images: Path
) -> None:
    path = converted[0].path
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    words = ("--precision", "int8", "--calibration", calibration_images, "--snr-db", "150", "--force")
    refused(gmmvit_here("convert", path, *words), "the gate does not hold before all ")
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_gate_that_the_images_cannot_show_is_refused(bundle: Bundle, calibration_images: Path) -> None:
    words = ("convert", bundle.path, "--precision", "int8", "--calibration", calibration_images)
    _, hint = refused(gmmvit_here(*words, "--keep-decisions", "0.98"), "cannot be shown on 32 images: it needs 133")
    assert "--calibration-images 266" in hint
    refused(gmmvit_here(*words, "--accuracy", "0.99"), "these have no labels")


def test_labels_that_cannot_judge_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    images = np.random.default_rng(3).integers(0, 256, (80, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(80) % 10)
    words = ("convert", bundle.path, "--precision", "int8", "--calibration", tmp_path / "x.npz", "--accuracy", "0.9")
    _, hint = refused(gmmvit_here(*words), "these labels cannot judge accuracy: PyTorch is right on")
    assert "--keep-decisions" in hint


def test_a_gate_of_accuracy_also_holds_kept_decisions() -> None:
    """Of 400 images, int8 takes 80 wrong answers for other wrong ones, so its accuracy is that of float32."""
    labels = np.arange(400) % 4
    before, after = labels.copy(), labels.copy()
    before[:200] += 1
    after[:200] += np.arange(200) % 5 // 3 + 1
    reference, logits = np.eye(4)[before % 4], np.eye(4)[after % 4]
    row = Gate(accuracy=0.95).row(logits, reference, labels, None)
    assert (row["accuracy"], row["float32_accuracy"], row["kept"], row["holds"]) == (0.5, 0.5, 0.8, False)
    assert Gate(accuracy=0.9).row(logits, reference, labels, None)["holds"]


def test_copies_neither_judge_nor_show_a_gate(bundle: Bundle, tmp_path: Path) -> None:
    """The image that sets a range would also judge it, and 512 copies of 40 images would show 0.98."""
    distinct = np.random.default_rng(2).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=np.tile(distinct, (13, 1, 1, 1)), labels=np.tile(np.arange(40) % 10, 13))
    images = open_images(bundle, str(tmp_path / "x.npz"), limit=520)
    assert np.concatenate(list(images)).tobytes() == bundle.inputs_from_pixels(distinct).tobytes()
    assert (images.record()["copies"], len(images.record()["image_sha256"])) == (480, 40)
    assert images.labels(bundle.manifest.labels).tolist() == list(np.arange(40) % 10)
    words = ("convert", bundle.path, "--precision", "int8", "--calibration", tmp_path / "x.npz")
    refused(gmmvit_here(*words, "--keep-decisions", "0.98"), "cannot be shown on 20 images: it needs 133")


@pytest.mark.parametrize(
    ("gate", "holds"),
    [
        (Gate(keep_decisions=0.95), True),
        (Gate(keep_decisions=0.99), False),
        (Gate(accuracy=0.95), True),
        (Gate(accuracy=0.985), False),
        (Gate(snr_db=10), True),
        (Gate(snr_db=60), False),
        (Gate(keep_decisions=0.95, snr_db=60), False),
    ],
)
def test_a_gate_holds_if_the_interval_reaches_it(gate: Gate, holds: bool) -> None:
    """Of 400 decisions, int8 changes 4, all of which were right."""
    reference = np.tile(np.eye(4, dtype=np.float32), (100, 1))
    logits = reference.copy()
    logits[:4] = logits[1:5]
    row = gate.row(logits, reference, reference.argmax(1), None)
    assert row["kept"] == 0.99
    assert row["kept_interval"][0] < 0.99 < row["kept_interval"][1]
    assert row["holds"] == holds
    if gate.accuracy:
        assert (row["accuracy"], row["float32_accuracy"]) == (0.99, 1.0)


def test_class_offsets_do_not_count_as_signal_of_a_multi_label_network() -> None:
    """A sigmoid follows each logit, so parity and recipes centre each class over the images."""
    random = np.random.default_rng(0)
    reference = random.standard_normal((2000, 3)) + np.array([50.0, -50.0, 0.0])
    logits = reference + 0.1 * random.standard_normal(reference.shape)
    row = Gate(snr_db=21).row(logits, reference, None, np.zeros(3))
    assert row["db"] == pytest.approx(20, abs=0.3)
    assert not row["holds"]


def test_a_changed_label_changes_the_decision_of_a_multi_label_network() -> None:
    reference = np.zeros((10, 3)) - 1
    logits = reference.copy()
    logits[0, 2] = 1
    assert Gate(snr_db=1).row(logits, reference, None, np.zeros(3))["kept"] == 0.9


def test_a_gate_of_features_needs_their_neighbours_on_enough_images() -> None:
    gate, random = Gate(keep_neighbours=0.9), np.random.default_rng(0)
    reference = random.standard_normal((200, 8)).astype(np.float32)
    same = gate.row_of_features(reference, reference)
    assert (same["holds"], same["neighbours"], same["db"]) == (True, 1.0, 200.0)
    near = gate.row_of_features(reference + random.standard_normal(reference.shape), reference)
    assert not near["holds"]
    assert near["neighbours_interval"][0] < near["neighbours"] < 0.9
    gate.require_images(100, None)
    with pytest.raises(InputError, match=r"--keep-neighbours 0\.9 cannot be shown on 99 images: it needs 100"):
        gate.require_images(99, None)
