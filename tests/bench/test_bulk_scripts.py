"""The scripts about classification in bulk judge what they measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from benchmarks.reported import bulk, bulk_kills
from benchmarks.shared.bulk_source import digit_images, rows_of
from benchmarks.shared.tables_bulk import bulk_kills_table, bulk_table

ROW = {
    "id": "a", "sha256": "00", "label": "cat", "probability": 0.5, "logits": [1.0, 2.0], "error": None,
    "bundle_sha256": "11",
}  # fmt: skip


def written(folder: Path, *rows: dict[str, Any], shards: int = 1) -> tuple[int, int, str]:
    folder.mkdir()
    for number in range(shards):
        part = pa.Table.from_pylist(list(rows[number::shards]))
        parquet.write_table(part, folder / f"shard-{number}.parquet")
    return rows_of(folder)


def test_rows_are_compared_bit_for_bit_whatever_their_shards(tmp_path: Path) -> None:
    other = {**ROW, "id": "b", "error": "broken"}
    count, distinct, digest = written(tmp_path / "one", ROW, other)
    assert (count, distinct) == (2, 2)
    assert written(tmp_path / "two", other, ROW, shards=2) == (2, 2, digest)
    assert written(tmp_path / "three", ROW, ROW)[:2] == (2, 1)
    changes = ({"label": "dog"}, {"probability": 0.5000000001}, {"logits": [1.0, 2.0000002]}, {"sha256": "01"})
    for number, change in enumerate(changes):
        assert written(tmp_path / f"change {number}", {**ROW, **change}, other)[2] != digest


def test_each_other_row_is_a_problem() -> None:
    good = {"rows": 9, "distinct": 9, "sha256": "ab" * 32, "same": True}
    assert bulk_kills.problems({"jobs": {"quiet": good, "kills": good}}, 9) == []
    for change in ({"rows": 8}, {"distinct": 8}, {"same": False}):
        (problem,) = bulk_kills.problems({"jobs": {"quiet": good, "ray": {**good, **change}}}, 9)
        assert problem.startswith("ray: ")


def test_the_images_are_those_that_the_question_names() -> None:
    made = list(digit_images(1000))
    assert (made[0], made[997]) == (made[1], made[998])
    assert len(set(made)) == 998
    assert made == list(digit_images(1000))


def test_the_rate_counts_from_the_second_batches() -> None:
    assert bulk.rate_of([(9.0, 8), (10.0, 16), (11.0, 24), (14.0, 56)], processes=1) == pytest.approx(10)
    two = [(10.0, 8), (10.1, 16), (12.0, 24), (12.1, 32), (14.0, 40), (14.1, 48)]  # each: eight images in two seconds
    assert bulk.rate_of(two, processes=2) == pytest.approx(8, rel=0.01)


def test_the_tables() -> None:
    share = {"median": 0.91, "low": 0.9, "high": 0.92}
    rates = {"bulk": 90.0, "runner": 100.0, "decoder": 3000.0}
    row = {"images_per_second": rates, "limit_per_second": 96.8, "share": share, "share_of_limit": share}
    assert "| PNG | 90/s | 100/s | 3,000/s | 97/s | 0.91" in bulk_table({"cores": 2, "rows": {"PNG": row}})
    job = {"rows": 10, "distinct": 10, "sha256": "abcdef0123456789", "same": False, "kills": 20}
    text = bulk_kills_table({"jobs": {"kills": job}})
    assert "| kills, 20 times kill -9 | 10 | 10 | `abcdef012345…` | **no** |" in text
