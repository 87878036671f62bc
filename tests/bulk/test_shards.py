"""The rows of other bundles than single-label ones, other destinations, and the same shard written twice."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from gmmvit_deploy.bulk._plan import Plan, shard_name
from gmmvit_deploy.bulk._shard import count_of_shard
from gmmvit_deploy.bulk._storage import JOB_FOLDER, Claims, Storage
from gmmvit_deploy.bulk.job import Job, OpenJob, require_bulk_runner, settings_of
from gmmvit_deploy.bulk.run import kept_images
from gmmvit_deploy.bulk.source import open_source
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from tests.bulk.sources import images, settled, write_folder
from tests.conftest import cifar_options, golden

FILES = images(12, broken=5)


def planned(bundle: Bundle, source: Path, folder: str, **changes: Any) -> tuple[Job, Plan, Storage]:
    job = Job(
        bundle=bundle.path,
        source=open_source(str(source)),
        folder=folder,
        runner="onnxruntime",
        batch=4,
        shard_images=6,
        decode_threads=1,
    )
    job = replace(job, **changes)
    return job, *settled(job.source, folder, settings_of(job, bundle))


def rows(storage: Storage, plan: Plan) -> list[dict[str, Any]]:
    tables = [parquet.read_table(io.BytesIO(storage.read(shard_name(shard.number)))) for shard in plan.shards]
    return [row for table in tables for row in table.to_pylist()]


@pytest.mark.nightly
@pytest.mark.integration
def test_several_labels_and_features(tmp_path: Path) -> None:
    options = cifar_options(task="multi-label", thresholds=0.4, outputs=("logits", "features"))
    bundle = bundle_from_checkpoint(golden("vit_gmm").path, tmp_path / "bundle", options)
    job, plan, storage = planned(bundle, write_folder(tmp_path / "s", FILES), str(tmp_path / "to"))
    with OpenJob(job) as opened:
        assert [opened.classify(shard) for shard in plan.shards] == ["done", "done"]
    labels = bundle.manifest.label_set
    seen = 0
    for row in rows(storage, plan):
        if row["error"]:
            assert row["label"] is row["probability"] is row["logits"] is None
            assert np.isnan(row["features"]).all()
            continue
        assert len(row["features"]) == bundle.manifest.outputs[1].shape[0]
        predictions = labels.predictions(np.array(row["logits"], np.float32), 1)
        assert row["label"] == list(labels.decided(predictions))
        assert all(probability >= 0.4 for probability in row["probability"])
        seen += len(row["label"])
    assert seen


def test_a_job_in_memory_has_the_bytes_of_a_job_on_a_disk(bundle: Bundle, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "s", FILES)
    written = []
    for folder in (str(tmp_path / "to"), f"memory:/{tmp_path}/to"):
        job, plan, storage = planned(bundle, source, folder)
        with OpenJob(job) as opened:
            for shard in plan.shards:
                opened.classify(shard)
        written.append([storage.read(shard_name(shard.number)) for shard in plan.shards])
        assert [count_of_shard(storage, shard.number)[1] for shard in plan.shards] == [0, 1]
    assert written[0] == written[1]


def test_an_interrupted_shard_continues_where_its_rows_were_kept(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gmmvit_deploy.bulk._shard._KEEP_EVERY_S", 0.0)
    folder = tmp_path / "to"
    source = write_folder(tmp_path / "s", FILES)
    job, plan, storage = planned(bundle, source, str(folder), shard_images=len(FILES))
    (shard,) = plan.shards
    with OpenJob(job) as opened:
        opened.classify(shard)
    expected = storage.read(shard_name(0))
    storage.remove(shard_name(0))
    seen: list[int] = []

    def interrupt(count: int) -> None:
        seen.append(count)
        raise KeyboardInterrupt

    for kept in (4, 8):
        with OpenJob(job) as opened, pytest.raises(KeyboardInterrupt):
            opened.classify(shard, interrupt)
        assert kept_images(folder) == (kept, len(FILES))
    with OpenJob(job) as opened:
        opened.classify(shard, seen.append)
    assert seen == [4, 4, 4]
    assert storage.read(shard_name(0)) == expected
    assert kept_images(folder) == (len(FILES), len(FILES))
    assert not list(folder.rglob("rows-*"))


@pytest.mark.parametrize(("keep_every_s", "removed"), [(0.0, False), (0.0, True), (30.0, False)])
def test_two_writers_of_a_shard_without_locks(
    keep_every_s: float, removed: bool, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no locks, one can write the shard, and remove its kept rows, while another is in the middle."""
    monkeypatch.setattr(Claims, "take", lambda self, number: True)
    monkeypatch.setattr("gmmvit_deploy.bulk._shard._KEEP_EVERY_S", keep_every_s)
    job, plan, storage = planned(bundle, write_folder(tmp_path / "s", FILES), str(tmp_path / "to"))
    written: list[bytes] = []
    with OpenJob(job) as first, OpenJob(job) as second:

        def meanwhile(_: int) -> None:
            if not written:
                first.classify(plan.shards[0])
                written.append(storage.read(shard_name(0)))
                if removed:  # by somebody: no rows are left, so the shard is computed again
                    storage.remove(shard_name(0))

        assert second.classify(plan.shards[0], meanwhile) == "done"
    assert [storage.read(shard_name(0))] == written
    assert not [name for name in storage.names() | storage.names(JOB_FOLDER) if name.startswith((".", "rows-"))]


def test_a_worker_with_other_versions_is_refused(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _, _ = planned(bundle, write_folder(tmp_path / "s", FILES), str(tmp_path / "to"))
    with pytest.raises(InputError, match="--batch: expected 4, got 2"):
        OpenJob(replace(job, batch=2))
    monkeypatch.setattr("gmmvit_deploy.bulk.job.version", lambda package: "9")
    with pytest.raises(InputError, match=r"version of pillow: expected .*, got 9"):
        OpenJob(job)


def test_batches_and_runners_that_do_not_fit_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    job, _, _ = planned(bundle, write_folder(tmp_path / "s", FILES), str(tmp_path / "to"))
    with pytest.raises(InputError, match="batch: expected at most 8"):
        settings_of(replace(job, batch=9), bundle)
    for runner in ("triton-grpc", "tensorrt"):
        with pytest.raises(InputError, match=f"runner {runner}: .* without a server"):
            require_bulk_runner(runner)
