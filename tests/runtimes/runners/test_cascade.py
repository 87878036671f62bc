"""A cascade answers as its fast program, and as float32 where that is nearly undecided; parity finds one that does not.

The programs are those of ONNX Runtime, which compute int8 alike on every processor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from gmmvit_deploy.bulk.run import classify_source
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.cascades import write_cascade
from gmmvit_deploy.errors import BundleError, InputError
from gmmvit_deploy.exporting.cascades import cascade_from_images
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference import cascade as cascade_program
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import RunnerReport
from gmmvit_deploy.runtimes.programs.openvino import has_bf16
from gmmvit_deploy.runtimes.runners.cascade import CascadeRunner
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier, classify_files
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.serving.front.options import FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.inference.test_preprocess import encoded, photo
from tests.parity.test_quantised import photographs, pixels

pytestmark = pytest.mark.integration
FAST = RunnerName.parse("onnxruntime:int8-static")
NAME = "onnxruntime:int8+fp32"


@pytest.fixture(scope="module")
def cascades(precise_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose cascade computes about a quarter of its images again."""
    folder = tmp_path_factory.mktemp("cascade")
    bundle = open_bundle(shutil.copytree(precise_bundle.path, folder / "bundle"))
    images = np.random.default_rng(3).integers(0, 256, (160, 4, 4, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images.repeat(8, axis=1).repeat(8, axis=2))
    with open_runner(FAST, bundle) as fast, open_runner("onnxruntime", bundle) as exact:
        record = cascade_from_images(bundle, fast, exact, str(folder / "images.npz"), keep_decisions=0.99)
    assert (len(record.margins), record.chose_graph) == (160, 0)
    assert record.with_target(0.99) == record
    # As if int8 changed the third of the decisions with the smallest margins, which it does not.
    losses = (float(np.quantile(record.margins, 1 / 3)),) * len(record.margins)
    write_cascade(bundle, FAST, replace(record, losses=losses).with_target(0.9))
    return bundle


def test_images_below_the_threshold_have_the_answers_of_float32_alone_and_in_a_batch(cascades: Bundle) -> None:
    inputs = cascades.inputs_from_pixels(pixels())
    with (
        open_runner(NAME, cascades) as runner,
        open_runner(FAST, cascades) as fast,
        open_runner("onnxruntime", cascades) as exact,
    ):
        assert runner.label == "onnxruntime:int8-static+fp32"
        together, expected = runner.rows_all(inputs), (fast.rows(inputs), exact.rows(inputs))
        alone = runner.rows_all(inputs, batch=1)
        assert runner.record is not None
    deferred = together[DEFERRED]
    assert 0 < deferred.sum() < len(inputs)
    np.testing.assert_array_equal(
        deferred[:, 0], cascade_program.decision_margins(expected[0]) < runner.record.threshold
    )
    np.testing.assert_allclose(together["logits"], np.where(deferred, expected[1], expected[0]), atol=1e-4)
    np.testing.assert_array_equal(alone[DEFERRED], deferred)
    np.testing.assert_allclose(alone["logits"], together["logits"], atol=1e-4)


def test_classified_files_and_tables_say_which_images_float32_computed_again(cascades: Bundle, tmp_path: Path) -> None:
    files = []
    for index, image in enumerate(pixels()):
        files.append(tmp_path / f"{index:03}.png")
        Image.fromarray(image).save(files[-1])
    with BundleClassifier(cascades, runner=NAME) as classifier:
        answers = classify_files(classifier, files)
    expected = [answer.deferred for answer in answers]
    assert {True, False} == set(expected)
    assert answers[0].to_json()["deferred"] == expected[0]
    classify_source(cascades, str(tmp_path), f"{tmp_path}/results", runner=NAME, batch=8)
    table = pyarrow.parquet.read_table(tmp_path / "results")
    assert sum(table["deferred"].to_pylist()) == sum(expected)


def judged(runner: Any, bundle: Bundle) -> RunnerReport:
    (report,) = check_parity(bundle, [runner], ParityOptions(data=photographs(), keep_decisions=0.5)).runners
    return report


def test_parity_judges_each_program_against_its_own_graph(cascades: Bundle) -> None:
    with open_runner(NAME, cascades) as runner:
        report = judged(runner, cascades)
    assert report.name == "onnxruntime:int8-static+fp32"
    failed = [check for check in report.checks if check.verdict == "failed"]
    assert not failed, failed
    again = [row for row in report.check("numeric").details["sets"] if "again in float32" in row["inputs"]]
    assert again
    assert all(row["limit"]["largest"] < 1e-3 for row in again)  # that of float32
    deferral = report.check("deferral")
    assert 0 < deferral.details["deferred"] < 1
    assert deferral.details["images"] == len(pixels())
    assert "(target" in deferral.summary


def another_threshold(runner: CascadeRunner) -> None:
    runner.record = replace(runner.record, threshold=runner.record.threshold * 1.5)


def another_network(runner: CascadeRunner) -> None:
    runner.record = replace(runner.record, golden_margins=runner.record.golden_margins[::-1])


def exchanged(runner: CascadeRunner) -> None:
    program = runner._cascade
    program._first, program._second = program._second, program._first


def on_probabilities(runner: CascadeRunner) -> None:
    program = runner._cascade
    first = program._first

    def probabilities(batch: np.ndarray) -> Any:
        logits, *others = first(batch)
        scores = np.exp(logits - logits.max(1, keepdims=True))
        return [scores / scores.sum(1, keepdims=True), *others]

    def answers(batch: np.ndarray) -> list[Any]:
        deferred = cascade_program.decision_margins(probabilities(batch)[0]) < program._threshold
        rows = [np.array(rows) for rows in first(batch)]
        if deferred.any():
            for own, again in zip(rows, program._second(batch[deferred]), strict=True):
                own[deferred] = again
        return [*rows, deferred[:, None]]

    program.answers = answers  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "check", "named"),
    [
        (another_threshold, "deferral", "is not the one that the recorded margins choose"),
        (another_network, "deferral", "the threshold was chosen for another"),
        (exchanged, "numeric", "another graph, such as the float32 graph"),
        (on_probabilities, "deferral", "another threshold or measure decides"),
    ],
)
def test_planted_mistakes_are_named(
    fault: Callable[[CascadeRunner], None], check: str, named: str, cascades: Bundle
) -> None:
    with open_runner(NAME, cascades) as runner:
        assert isinstance(runner, CascadeRunner)
        fault(runner)
        report = judged(runner, cascades)
    assert any(named in reason for reason in report.check(check).reasons), report.check(check)


def test_calibration_images_choose_a_threshold_only_if_there_are_few_others(
    precise_bundle: Bundle, calibration_images: Path, tmp_path: Path
) -> None:
    with open_runner(FAST, precise_bundle) as fast, open_runner("onnxruntime", precise_bundle) as exact:
        assert fast.graph is not None
        assert fast.graph.record is not None
        calibrated = (fast.graph.record.calibration or {})["image_sha256"]
        few = str(calibration_images)
        with pytest.raises(InputError, match=r"images of .* set no range, and a threshold needs 32"):
            cascade_from_images(precise_bundle, fast, exact, few, keep_decisions=0.99)
        with np.load(calibration_images) as arrays:
            both = np.concatenate([arrays["images"], pixels()])
        np.savez(tmp_path / "both.npz", images=both)
        record = cascade_from_images(precise_bundle, fast, exact, str(tmp_path / "both.npz"), keep_decisions=0.99)
    assert record.chose_graph == 0
    assert not set(calibrated) & set(record.image_sha256)
    assert f"{len(record.margins)} images prove" in str(record)


@pytest.mark.nightly
@pytest.mark.skipif(not has_bf16(), reason="this CPU has no bf16")
def test_bf16_comes_first_in_a_cascade_too(bundle: Bundle, tmp_path: Path) -> None:
    copy = open_bundle(shutil.copytree(bundle.path, tmp_path / "bundle"))
    fast = RunnerName.parse("openvino:bf16")
    np.savez(tmp_path / "images.npz", images=pixels())
    with open_runner(fast, copy) as first, open_runner("openvino", copy) as second:
        record = cascade_from_images(copy, first, second, str(tmp_path / "images.npz"), keep_decisions=0.99)
    write_cascade(copy, fast, replace(record, threshold=float(np.median(record.margins))))
    options = RepositoryOptions(runner=RunnerName.parse("openvino:bf16+fp32"), threads=1)
    repository = repository_from_bundle(copy, tmp_path / "models", options)
    inputs = copy.inputs_from_pixels(pixels())
    with (
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as server,
        open_runner("triton-grpc", copy, url=server.grpc_url) as served,
        open_runner("openvino", copy) as exact,
    ):
        answers, expected = served.rows_all(inputs), exact.rows(inputs)
    deferred = answers[DEFERRED][:, 0]
    assert 0 < deferred.sum() < len(deferred)
    np.testing.assert_allclose(answers["logits"][deferred], expected[deferred], atol=1e-4)


def test_a_threshold_of_another_network_or_none_is_refused_with_what_to_type(cascades: Bundle, tmp_path: Path) -> None:
    bundle = open_bundle(shutil.copytree(cascades.path, tmp_path / "bundle"))
    file = bundle.path / "graphs" / "onnxruntime-int8-static+fp32.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "graph_sha256": "0" * 64}))
    with pytest.raises(BundleError, match=r"its threshold was chosen for another network[\s\S]*gmmvit optimize"):
        open_runner(NAME, bundle)
    file.unlink()
    with pytest.raises(BundleError, match=r"no such file, which states the images[\s\S]*gmmvit optimize"):
        open_runner(NAME, bundle)
    with pytest.raises(InputError, match="expected int8 or bf16 on a CPU"):
        open_runner("onnxruntime:fp16+fp32", bundle)


def test_a_served_cascade_says_which_images_float32_answered_and_counts_them(cascades: Bundle, tmp_path: Path) -> None:
    options = RepositoryOptions(runner=RunnerName.parse(NAME), threads=1)
    repository = repository_from_bundle(cascades, tmp_path / "models", options)
    assert repository.runner == "onnxruntime:int8-static+fp32"
    inputs = cascades.inputs_from_pixels(pixels())
    with TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as server:
        with open_runner("triton-grpc", cascades, url=server.grpc_url) as served, open_runner(NAME, cascades) as local:
            ours, theirs = local.rows_all(inputs), served.rows_all(inputs)
            np.testing.assert_array_equal(theirs[DEFERRED], ours[DEFERRED])
            np.testing.assert_allclose(theirs["logits"], ours["logits"], atol=1e-4)
            report = judged(served, cascades)
            assert not [check for check in report.checks if check.verdict == "failed"], report.checks
            labels = served.server.connection.infer_all(  # of the last model of the ensemble alone
                "gmmvit_classify", "IMAGE", np.array([[encoded(photo(40, 30), "PNG")]], object), outputs=("label",)
            )
            assert labels[0].shape == (1, 5)
        metrics = httpx.get(server.metrics_url, trust_env=False).text
        counts = {
            line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("gmmvit_")
        }
        assert 0 < counts["gmmvit_deferred_images_total"] < counts["gmmvit_images_total"]
        with FrontProcess(FrontOptions(triton_url=server.http_url), None) as front:
            front.wait_ready()
            url = f"{front.url}/classify"
            answer = httpx.post(url, content=encoded(photo(40, 30), "PNG"), timeout=30, trust_env=False).json()
    assert answer["runner"] == "onnxruntime:int8-static+fp32"
    assert [type(deferred) for deferred in answer["deferred"]] == [bool]
