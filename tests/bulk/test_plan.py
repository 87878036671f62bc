"""The plan of a job: fixed shards, refused changes, and claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.bulk._plan import Plan, Settings, entries_of
from gmmvit_deploy.bulk._storage import JOB_FOLDER, Storage
from gmmvit_deploy.bulk.run import INDEX_VARIABLE, part_from
from gmmvit_deploy.bulk.source import open_source
from gmmvit_deploy.errors import InputError, OutputError
from tests.bulk.sources import images, png, settled, write_folder

SETTINGS = Settings(
    bundle_sha256="12ab", runner="onnxruntime", batch=4, shard_images=3, image_column="", versions={"pillow": "1"}
)


def planned(source: Path, folder: Path | str, settings: Settings = SETTINGS) -> Plan:
    return settled(open_source(str(source)), str(folder), settings)[0]


def test_changed_settings_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "s", images(4))
    planned(tmp_path / "s", tmp_path / "to")
    changed = Settings(
        bundle_sha256="34cd", runner="openvino", batch=8, shard_images=9, image_column="x", versions={"pillow": "2"}
    )
    with pytest.raises(InputError) as refused:
        planned(tmp_path / "s", tmp_path / "to", changed)
    for message in (
        "bundle: expected 12ab, got 34cd",
        "--runner: expected onnxruntime, got openvino",
        "--batch: expected 4, got 8",
        "--shard-images: expected 3, got 9",
        "--image-column: expected , got x",
        "version of pillow: expected 1, got 2",
    ):
        assert message in str(refused.value)
    planned(tmp_path / "s", tmp_path / "to")


def test_a_changed_source_is_refused_with_its_changes(tmp_path: Path) -> None:
    write_folder(tmp_path / "s", images(5))
    plan = planned(tmp_path / "s", tmp_path / "to")
    assert planned(tmp_path / "s", tmp_path / "to") == plan
    (tmp_path / "s" / "0" / "0000.png").write_bytes(png(9))
    (tmp_path / "s" / "0" / "0002.png").unlink()
    write_folder(tmp_path / "s", {"2/new.png": png(1), "2/other.png": png(1)})
    message = r"1 changed \(0/0000.png\); 1 missing \(0/0002.png\); 2 new \(2/new.png, 2/other.png\)"
    with pytest.raises(InputError, match=message):
        planned(tmp_path / "s", tmp_path / "to")


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "s", images(2))
    write_folder(tmp_path / "to", {"letter.txt": b""})
    with pytest.raises(InputError, match=r"it holds letter\.txt"):
        planned(tmp_path / "s", tmp_path / "to")
    with pytest.raises((InputError, OutputError), match="Not a directory"):
        planned(tmp_path / "s", tmp_path / "to" / "letter.txt")
    write_folder(tmp_path / "odd", {f"{JOB_FOLDER}/plan.json": b"{"})
    with pytest.raises(InputError, match="expected the plan of a job"):
        planned(tmp_path / "s", tmp_path / "odd")
    write_folder(tmp_path / "odd", {f"{JOB_FOLDER}/plan.json": b'{"format": "gmmvit-bulk/1"}'})
    with pytest.raises(InputError, match="expected the format gmmvit-bulk/2, got gmmvit-bulk/1"):
        planned(tmp_path / "s", tmp_path / "odd")


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDEX_VARIABLE, "2")
    assert part_from(f"{INDEX_VARIABLE}/3") == (2, 3)
    monkeypatch.delenv(INDEX_VARIABLE)
    for wrong in (f"{INDEX_VARIABLE}/3", "3/3", "-1/3", "1", "1/0", "a/b"):
        with pytest.raises(InputError, match="expected I/N with 0 <= I < N"):
            part_from(wrong)


def test_no_content_of_a_plan_is_trusted(tmp_path: Path) -> None:
    write_folder(tmp_path / "s", images(4))
    plan = planned(tmp_path / "s", tmp_path / "to")
    manifest = tmp_path / "to" / JOB_FOLDER / plan.manifest
    manifest.write_text(manifest.read_text().replace("[", "{"))
    with pytest.raises(InputError, match=r"manifest-.*\.jsonl: cannot be read"):
        entries_of(Storage(str(tmp_path / "to")), plan, plan.shards[0])
