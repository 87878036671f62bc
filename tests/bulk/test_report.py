"""The report on a job: its numbers, and its page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from gmmvit_deploy.bulk._plan import read_plan
from gmmvit_deploy.bulk._report import BulkReport, page_of, report_of
from gmmvit_deploy.bulk._storage import Storage
from gmmvit_deploy.bulk.run import REPORT, classify_source
from gmmvit_deploy.bundle.artifacts import Bundle
from tests.bulk.sources import images, png, write_folder
from tests.pages import require_readable_page


@pytest.fixture(scope="module")
def results(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images, one of them four times and one broken."""
    folder = tmp_path_factory.mktemp("report")
    copies = {f"copies/{n}.png": png(4) for n in range(3)}
    write_folder(folder / "source", {**images(30, broken=7), **copies})
    result = classify_source(bundle.path, str(folder / "source"), str(folder / "to"), shard_images=20, workers=1)
    assert result.complete
    return folder


def test_numbers_are_those_of_the_rows(results: Path) -> None:
    storage = Storage(str(results / "to"))
    plan = read_plan(storage)
    assert plan is not None
    report = report_of(storage, plan)
    rows = parquet.read_table(results / "to").to_pylist()
    good = [row for row in rows if row["error"] is None]
    assert (report.images, report.broken, report.duplicates) == (33, 1, 3)
    assert {label: count for label, (count, _) in report.classes.items()} == Counter(row["label"] for row in good)
    for label, (_, total) in report.classes.items():
        assert total == pytest.approx(sum(row["probability"] for row in good if row["label"] == label))
    assert sum(report.confidence) == len(good)
    assert report.errors == {"the file is not a JPEG, PNG, WEBP or BMP image": (1, "1/0007.png")}
    assert report.most_repeated == [["0/0004.png", "copies/0.png", "copies/1.png", "copies/2.png"]]


def test_the_page_can_be_read(results: Path) -> None:
    tree = require_readable_page((results / "to" / REPORT).read_text(encoding="utf-8"))
    text = tree.text
    assert "Verdict: ✗ 1 BROKEN IMAGE" in text
    assert "The network answered 32 of 33 images." in text
    assert "3 images with the content of another image." in text
    assert "copies/0.png, copies/1.png, copies/2.png" in text
    plan = read_plan(Storage(str(results / "to")))
    assert plan is not None
    for broken, verdict in ((0, "✓ COMPLETE"), (1, "? 1 BROKEN IMAGE"), (501, "✗ 501 BROKEN IMAGES")):
        page = require_readable_page(page_of(BulkReport(images=501, broken=broken), plan, name="bundle"))
        assert f"Verdict: {verdict}" in page.text
