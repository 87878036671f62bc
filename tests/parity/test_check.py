"""Correct runners pass for every model; unsuitable options and data are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.inference.precision import PRECISIONS
from gmmvit_deploy.parity import _neighbours
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.page import page_of, summary_of, write_page
from gmmvit_deploy.parity.report import SCHEMA_PATH, ParityReport
from gmmvit_deploy.runtimes.runners.names import RUNNERS
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtimes.runners.open import open_runner, open_runners
from gmmvit_deploy.runtimes.runners.runner import Runner
from tests.browser import accessibility_problems
from tests.conftest import EACH_FAMILY, photo_pixels
from tests.pages import require_readable_page
from tests.parity.faults import Altered
from tests.parity.test_faults import answers_of, labelled_by

SCHEMA = json.loads(SCHEMA_PATH.read_text())


@pytest.mark.first(1)
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_right_runners_pass(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles[name]
    with open_runners(["eager", "onnxruntime"], bundle) as runners:
        report = check_parity(bundle, runners, ParityOptions(localize=True))
    assert report.passed, report.failures()
    for runner in report.runners:
        assert runner.check("batch invariance").details["batches"] == [1, 2, 3, 5, 8]
        sets = [(group["inputs"], group["batch"]) for group in runner.check("numeric").details["sets"]]
        assert sets == [("golden", 1), ("random", 1), ("golden", 8), ("random", 8)]
    blocks = report.runners[1].check("localize").details["blocks"]
    attentions = len(bundle.manifest.masks) or 2  # plain models have no masks to count by
    assert len(blocks) >= attentions + 1
    assert blocks[-1]["block"] == "logits"
    jsonschema.validate(report.to_json(), SCHEMA)


@pytest.fixture(scope="module")
def report(precise_bundle: Bundle) -> ParityReport:
    """Check two precisions of a bundle, with data of which some images are broken."""
    data = labelled_by(precise_bundle, 40)
    with (
        OnnxRuntimeRunner(precise_bundle) as exact,
        open_runner("onnxruntime", precise_bundle, precision="int8") as coarse,
    ):
        return check_parity(
            precise_bundle, [exact, coarse], ParityOptions(data=data, localize=True, gate=0.9, keep_decisions=0.5)
        )


def test_images_that_calibrated_a_graph_do_not_judge_it(precise_bundle: Bundle, calibration_images: Path) -> None:
    """40 other images of 104 remain, or none; float32 was not calibrated, and is judged on all."""
    with np.load(calibration_images) as arrays:
        calibrated = arrays["images"]
    others = labelled_by(precise_bundle, 40)
    pixels = np.concatenate([calibrated, [others.pixels(index, precise_bundle.manifest.image) for index in range(40)]])
    for images, verdict, judged in ((pixels, "passed", 40), (calibrated, "undecided", 0)):
        data = ArrayImages("x", images, answers_of(precise_bundle, images))
        with (
            OnnxRuntimeRunner(precise_bundle) as exact,
            open_runner("onnxruntime", precise_bundle, precision="int8") as coarse,
        ):
            report = check_parity(precise_bundle, [exact, coarse], ParityOptions(data=data, gate=0.9))
        jsonschema.validate(report.to_json(), SCHEMA)
        plain, quantized = (runner.check("accuracy") for runner in report.runners)
        assert plain.details["images"] == len(images)
        assert (quantized.verdict, quantized.details.get("images", 0)) == (verdict, judged), quantized
        assert "the graph was calibrated on" in quantized.summary
        assert report.runners[1].check("stages").verdict == verdict


def test_few_images_are_enough_where_no_answer_can_change(precise_bundle: Bundle) -> None:
    """float32 is judged by margins; logits beyond their limit, and int8, by statistics, as with more images."""
    options = ParityOptions(data=labelled_by(precise_bundle, 40), keep_decisions=0.999)
    with (
        OnnxRuntimeRunner(precise_bundle) as exact,
        Altered(precise_bundle, lambda logits: logits + 1e-3) as beyond,
        open_runner("onnxruntime", precise_bundle, precision="int8") as coarse,
    ):
        report = check_parity(precise_bundle, [exact, beyond, coarse], options)
    assert "more images would only look for an image that is nearer" in report.more_images
    assert report.more_images in summary_of(replace(report, runners=report.runners[:1])).changes
    for name in ("decisions", "accuracy"):
        margins, *statistics = (runner.check(name) for runner in report.runners)
        assert margins.verdict == "passed", margins
        assert statistics[0].verdict == "undecided"
        assert statistics[1].verdict != "passed"
        assert "too few images to decide" in statistics[0].reasons[0]


def test_the_schema_knows_every_runner_and_precision() -> None:
    properties = SCHEMA["properties"]["runners"]["items"]["properties"]
    assert properties["runner"]["enum"] == list(RUNNERS)
    assert properties["precision"]["enum"] == list(PRECISIONS)


def test_a_report_satisfies_its_schema(report: ParityReport) -> None:
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    jsonschema.validate(data, SCHEMA)
    (accuracy,) = [check for check in data["runners"][0]["checks"] if check["name"] == "accuracy"]
    assert (accuracy["name"], accuracy["verdict"]) == ("accuracy", "passed")
    assert accuracy["details"]["top1"]["pytorch"] == accuracy["details"]["top1"]["runner"] == 1.0
    assert accuracy["details"]["top5"]["runner"] == 1.0
    assert sum(row["images"] for row in accuracy["details"]["per_class"]) == 40
    assert data["data"]["images"] == 40
    assert data["runners"][1]["provenance"]["graph"] == "int8-static.onnx"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.nightly
@pytest.mark.integration
def test_the_page_shows_everything_and_fetches_nothing(report: ParityReport, tmp_path: Path) -> None:
    write_page(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 6  # margins, blocks and classes, of each runner
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in page
    assert "<link" not in page
    for word in (report.bundle["sha256"], "onnxruntime", "Skipped", "relative L2", "McNemar", "Error by block"):
        assert word in page
    for check in (*report.checks, *report.runners[0].checks):
        assert f">{check.name}<" in page
    assert page_of(report) == page  # the same report gives the same bytes
    tree = require_readable_page(page)
    assert tree.all("h2")[0].text == "Verdict: ✓ PASSED"
    assert "can stand in for the trained PyTorch model" in tree.all("main")[0].text
    (fold,) = tree.all("details")
    for runner in report.runners:
        for check in runner.checks:
            assert (check.summary in fold.text) == (check.verdict == "skipped")
    assert accessibility_problems(tmp_path / "report.html") == []


def test_flips_within_the_noise_are_separated_from_wrong_answers(bundle: Bundle) -> None:
    """A tie that noise decides is a flip within the noise; no other decision may flip."""
    from gmmvit_deploy.parity._decisions import Decisions
    from gmmvit_deploy.tolerances import Limit

    decisions = Decisions(["cat", "dog", "frog"])
    exact = np.array([[1.0, 1.0 + 1e-7, 0.0], [2.0, 1.0, 0.0], [3.0, 0.0, 1.0]])
    logits = np.array([[1.0 + 1e-6, 1.0, 0.0], [1.0, 2.0, 0.0], [3.0, 0.0, 1.0]])
    decisions.add(["tie.png", "wrong.png", "fine.png"], logits, exact, exact)
    check = decisions.check(Limit(largest=1e-6, rms=None, derivation=""))
    assert check.verdict == "failed"
    assert (check.details["flips_within_noise"], check.details["flips_wrong"]) == (1, 1)
    tie, wrong = check.details["flips"]
    named = {"where": "tie.png", "pytorch_class": "dog", "runner_class": "cat", "within_noise": True}
    assert tie == {**named, "margin": pytest.approx(1e-7)}
    assert (wrong["where"], wrong["margin"], wrong["within_noise"]) == ("wrong.png", 1.0, False)
    assert check.reasons == (
        "wrong.png: PyTorch predicts cat, the runner dog; the margin is 1, but noise explains at most 2e-06",
    )
    passing = Decisions(["cat", "dog", "frog"])
    passing.add(["tie.png"], logits[:1], exact[:1], exact[:1])
    assert passing.check(Limit(largest=1e-6, rms=None, derivation="")).verdict == "passed"


def test_every_profile_is_tried(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 1 and of 4 to 8, like an engine with two profiles."""
    monkeypatch.setattr(OnnxRuntimeRunner, "ranges", ((1, 1), (4, 8)))
    with OnnxRuntimeRunner(bundle) as runner:
        report = check_parity(bundle, [runner])
    assert report.passed, report.failures()
    assert report.runners[0].check("batch invariance").details["batches"] == [1, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["eager", "eager"], {}, "eager is named more than once"),
        (["eager"], {"urls": ["grpc://localhost:1"]}, "runs in this process"),
        (["triton-grpc"], {"urls": ["http://localhost:1"]}, "no runner uses the protocol of this address"),
        (["triton-grpc"], {"urls": ["grpc://localhost:1", "grpc://localhost:2"]}, "one for each protocol"),
        (["eager"], {"precision": "fp16"}, "only onnxruntime"),
    ],
)
def test_runners_side_by_side(names: list[str], options: dict[str, Any], message: str, bundle: Bundle) -> None:
    with pytest.raises(InputError, match=message), open_runners(names, bundle, **options):
        pass


def test_options() -> None:
    for option in ({"gate": 1.5}, {"limit": 0}, {"on_broken": "ask"}, {"limit": "all"}):
        (name,) = option
        with pytest.raises(InputError, match=f"{name}: expected"):
            ParityOptions(**option)


def test_data_that_does_not_fit_the_bundle(bundle: Bundle, tensor_bundles: dict[str, Bundle]) -> None:
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    for checked, data, message in (
        (bundle, open_data("digits"), "expected the bundle's"),
        (bundle, ArrayImages("x", pixels, [10]), r"expected class indices 0\.\.9, got 10\.\.10"),
        (tensor_bundles["vit_gmm"], ArrayImages("x", pixels, [1]), "has no mean and std"),
    ):
        with OnnxRuntimeRunner(checked) as runner, pytest.raises(InputError, match=message):
            check_parity(checked, [runner], ParityOptions(data=data))


def test_data_without_classes_is_skipped_with_a_reason(bundle: Bundle) -> None:
    unlabelled = ArrayImages("x", np.arange(3, dtype=np.uint8).repeat(32 * 32 * 3).reshape(3, 32, 32, 3), None)
    with OnnxRuntimeRunner(bundle) as runner:
        accuracy = check_parity(bundle, [runner], ParityOptions(data=unlabelled)).runners[0].check("accuracy")
    assert (accuracy.verdict, accuracy.summary) == ("skipped", "the data has no labels: 3 images without a true class")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(6):
        path = tmp_path / "images" / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), 40 * index, np.uint8)).save(path)
    (tmp_path / "images" / "cat" / "2.png").write_bytes(b"\x89PNG broken")
    (tmp_path / "images" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "images" / "stray").write_bytes((tmp_path / "images" / "cat" / "0.png").read_bytes())
    return tmp_path / "images"


def test_a_broken_image_is_fatal_or_skipped_as_asked(folder: Path, bundle: Bundle) -> None:
    images = open_data(str(folder))
    with pytest.raises(ImageError, match=r"2\.png: the file is not a JPEG") as caught:
        list(ImageStream(bundle=bundle, images=images, batch=4))
    assert "--on-broken skip" in caught.value.hint
    stream = ImageStream(bundle=bundle, images=images, batch=4, on_broken="skip")
    batches = list(stream)
    assert [len(batch.where) for batch in batches] == [4, 1]
    assert (stream.broken_count, len(stream.taken)) == (1, 5)
    ((where, why),) = stream.broken
    assert where.endswith("cat/2.png")
    assert why.startswith("the file is not a JPEG")
    with OnnxRuntimeRunner(bundle) as runner:
        report = check_parity(bundle, [runner], ParityOptions(data=images, on_broken="skip"))
    assert (report.data["images"], report.data["of"], report.data["broken"]) == (5, 6, 1)
    assert report.data["broken_images"][0]["image"].endswith("cat/2.png")
    assert report.runners[0].check("accuracy").details["images"] == 5
    left_out = f"2 files were left out: 1 .txt ({folder}/dog/notes.txt), 1 outside the class folders ({folder}/stray)"
    assert report.left_out() == left_out
    assert left_out in require_readable_page(page_of(report)).text
    jsonschema.validate(report.to_json(), SCHEMA)


def test_copies_of_an_image_count_once(precise_bundle: Bundle) -> None:
    """600 copies of an image show no more than the image itself."""
    images = labelled_by(precise_bundle, 2)
    pixels = np.stack([images.pixels(index, precise_bundle.manifest.image) for index in [0, *[1] * 600, 0]])
    data = ArrayImages("x", pixels, answers_of(precise_bundle, pixels))
    with open_runner("onnxruntime", precise_bundle, precision="int8") as runner:
        report = check_parity(precise_bundle, [runner], ParityOptions(data=data, keep_decisions=0.99))
    assert (report.data["images"], report.data["of"], report.data["copies"]) == (2, 602, 600)
    assert "with the pixels of another, so not counted: 600 images" in report.left_out()
    decisions, accuracy = (report.runners[0].check(name) for name in ("decisions", "accuracy"))
    assert (decisions.verdict, decisions.details["inputs"]) == ("undecided", 2)
    assert (accuracy.verdict, accuracy.details["images"]) == ("undecided", 2)


def test_nothing_but_broken_images(folder: Path, bundle: Bundle) -> None:
    for path in folder.rglob("*.png"):
        path.write_bytes(b"nothing")
    stream = ImageStream(bundle=bundle, images=open_data(str(folder)), batch=4, on_broken="skip")
    with pytest.raises(InputError, match="all 6 images are broken"):
        list(stream)


# ---- features keep their nearest neighbours --------------------------------------------------------------------------


def photographs(count: int) -> ArrayImages:
    return ArrayImages("photographs", photo_pixels(6, count), None)


def checked(bundle: Bundle, runner: Runner, *, gate: float | None = None, count: int = 160) -> Check:
    with runner:
        options = ParityOptions(data=photographs(count), keep_neighbours=gate)
        report = check_parity(bundle, [runner], options)
    jsonschema.validate(report.to_json(), json.loads(SCHEMA_PATH.read_text()))
    return report.runners[0].check("neighbours")


@pytest.mark.integration
@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["features_bundle", "both_bundle"])
def test_float32_keeps_all_neighbours(kind: str, request: pytest.FixtureRequest) -> None:
    bundle = request.getfixturevalue(kind)
    assert checked(bundle, OnnxRuntimeRunner(bundle)).verdict == "skipped"
    check = checked(bundle, OnnxRuntimeRunner(bundle), gate=0.95)
    assert (check.verdict, check.details["images"]) == ("passed", 160)
    assert check.details["kept"] > 0.999


@pytest.mark.integration
def test_every_second_of_many_images_is_kept(features_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_neighbours, "_MAX_IMAGES", 150)
    check = checked(features_bundle, OnnxRuntimeRunner(features_bundle), gate=0.9, count=220)
    assert (check.verdict, check.details["images"]) == ("passed", 110)


@pytest.mark.integration
@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["openvino:int8-dynamic", "onnxruntime:fp16"])
def test_other_precisions_without_logits_have_a_gate(name: str, features_bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(features_bundle.path, tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    variant_from_bundle(bundle, "int8" if "int8" in name else "fp16")
    check = checked(bundle, open_runner(name, bundle))
    assert check.details["gate"] == 0.9
    assert 0.9 < check.details["kept"] <= 1
    low, high = check.details["interval"]
    assert low < check.details["kept"] <= high


@pytest.mark.integration
def test_other_features_fail(features_bundle: Bundle) -> None:
    noise = np.random.default_rng(0)
    runner = Altered(features_bundle, lambda rows: rows + 0.1 * noise.standard_normal(rows.shape).astype(np.float32))
    check = checked(features_bundle, runner, gate=0.9)
    assert check.verdict == "failed"
    assert check.reasons == ("the precision changes too many neighbours",)


@pytest.mark.integration
def test_what_cannot_be_judged_is_undecided(bundle: Bundle, features_bundle: Bundle) -> None:
    check = checked(bundle, OnnxRuntimeRunner(bundle), gate=0.9, count=8)
    assert (check.verdict, "the bundle has no features" in check.summary) == ("undecided", True)
    check = checked(features_bundle, OnnxRuntimeRunner(features_bundle), gate=0.9, count=99)
    assert (check.verdict, check.reasons) == ("undecided", ("too few images to decide: 99, expected at least 100",))
