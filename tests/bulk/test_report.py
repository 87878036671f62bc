"""The report on a job: its numbers, and its page."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from gmmvit_deploy.bulk._plan import read_plan
from gmmvit_deploy.bulk._report import BulkReport, Reference, page_of, reference_of, report_of
from gmmvit_deploy.bulk._storage import Storage
from gmmvit_deploy.bulk.run import REPORT, classify_source
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.bulk.sources import images, png, write_folder
from tests.pages import require_readable_page


def plain(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def results(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images of noise, one of them four times and one broken, and three plain images, which are unlike noise."""
    folder = tmp_path_factory.mktemp("report")
    copies = {f"copies/{n}.png": png(4) for n in range(3)}
    odd = {f"odd/{n}.png": plain(colour) for n, colour in enumerate(((255, 0, 0), (0, 255, 0), (0, 0, 255)))}
    write_folder(folder / "source", {**images(30, broken=7), **copies, **odd})
    write_folder(folder / "usual", {f"{n}.png": png(1000 + n) for n in range(60)})
    result = classify_source(
        bundle.path,
        str(folder / "source"),
        str(folder / "to"),
        shard_images=20,
        workers=1,
        calibration=str(folder / "usual"),
    )
    assert result.complete
    return folder


def golden_count(bundle: Bundle) -> int:
    golden = bundle.golden_set()
    return len(golden.inputs) + len(golden.images)


def read_report(results: Path, reference: Reference) -> BulkReport:
    storage = Storage(str(results / "to"))
    plan = read_plan(storage)
    assert plan is not None
    return report_of(storage, plan, reference)


def test_numbers_are_those_of_the_rows(results: Path, bundle: Bundle) -> None:
    reference = reference_of(bundle, OnnxRuntimeRunner(bundle), open_images(bundle, str(results / "usual"), limit=60))
    report = read_report(results, reference)
    rows = parquet.read_table(results / "to").to_pylist()
    good = [row for row in rows if row["error"] is None]
    assert (report.images, report.broken, report.duplicates) == (36, 1, 3)
    assert {label: count for label, (count, _) in report.classes.items()} == Counter(row["label"] for row in good)
    for label, (_, total) in report.classes.items():
        assert total == pytest.approx(sum(row["probability"] for row in good if row["label"] == label))
    assert sum(report.confidence) == len(good)
    assert report.errors == {"the file is not a JPEG, PNG, WEBP or BMP image": (1, "1/0007.png")}
    assert report.most_repeated == [["0/0004.png", "copies/0.png", "copies/1.png", "copies/2.png"]]
    assert (reference.golden, reference.calibration, reference.output) == (golden_count(bundle), 60, "logits")
    distances = [distance for distance, _, _ in report.most_unusual]
    assert distances == sorted(distances, reverse=True)
    unusual = {name for distance, name, _ in report.most_unusual if distance > reference.limit}
    assert unusual == {f"odd/{n}.png" for n in range(3)}
    assert report.unusual == len(unusual)


def test_distances_are_those_to_the_nearest_reference(results: Path, bundle: Bundle) -> None:
    golden = bundle.golden_set()
    stored = np.concatenate([golden.logits, golden.image_logits]).astype(np.float64)
    unit = stored - stored.mean(1, keepdims=True)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    reference = reference_of(bundle, OnnxRuntimeRunner(bundle), None)
    others = [min(np.linalg.norm(a - b) for k, b in enumerate(unit) if k != n) for n, a in enumerate(unit)]
    assert reference.limit == pytest.approx(max(others), abs=1e-9)
    report = read_report(results, reference)
    distance, name, label = report.most_unusual[0]
    row = next(row for row in parquet.read_table(results / "to").to_pylist() if row["id"] == name)
    answer = np.array(row["logits"]) - np.mean(row["logits"])
    answer /= np.linalg.norm(answer)
    assert distance == pytest.approx(np.linalg.norm(answer - unit, axis=1).min(), abs=1e-9)
    assert label == row["label"]


def test_the_page_can_be_read(results: Path, bundle: Bundle) -> None:
    tree = require_readable_page((results / "to" / REPORT).read_text(encoding="utf-8"))
    text = tree.text
    assert "Verdict: ✗ 1 BROKEN IMAGE" in text
    assert "The network answered 35 of 36 images." in text
    assert "3 images with the content of another image." in text
    assert f"{golden_count(bundle)} reference images and 60 calibration images" in text
    assert "copies/0.png, copies/1.png, copies/2.png" in text
    plan = read_plan(Storage(str(results / "to")))
    assert plan is not None
    for broken, verdict in ((0, "✓ COMPLETE"), (1, "? 1 BROKEN IMAGE"), (501, "✗ 501 BROKEN IMAGES")):
        page = require_readable_page(page_of(BulkReport(images=501, broken=broken), plan, name="bundle"))
        assert f"Verdict: {verdict}" in page.text
