"""The OCI image of a model: the same files give the same digest, and umoci unpacks it file for file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.manifests.image import image_from_folder
from gmmvit_deploy.manifests.pack import BUNDLE_LABEL, pack
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.writing import sha256_of_file
from tests.manifests.made import tuning_file

needs_umoci = pytest.mark.skipif(
    shutil.which("umoci") is None, reason="no umoci on PATH; on Debian, type apt-get install umoci"
)


def contents(folder: Path) -> dict[str, str]:
    """Return path → hash of its content, and "folder" for folders."""
    paths = folder.rglob("*")
    return {str(path.relative_to(folder)): "folder" if path.is_dir() else sha256_of_file(path) for path in paths}


def blob(layout: Path, digest: str) -> dict[str, Any]:
    return json.loads((layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes())


@needs_umoci
@pytest.mark.process
def test_umoci_unpacks_a_repository_file_for_file(repository: Repository, bundle: Bundle, tmp_path: Path) -> None:
    image = pack(repository.path, tmp_path / "image")
    command = ["umoci", "unpack", "--rootless", "--image", f"{image.path}:latest", tmp_path / "unpacked"]
    subprocess.run(command, check=True, capture_output=True)
    root = tmp_path / "unpacked" / "rootfs"
    assert [path.name for path in root.iterdir()] == ["models"]
    assert contents(root / "models") == contents(repository.path)
    config = blob(image.path, blob(image.path, image.digest)["config"]["digest"])
    assert config["config"]["Labels"][BUNDLE_LABEL] == bundle.sha256
    stat = subprocess.run(
        ["umoci", "stat", "--image", f"{image.path}:latest", "--json"], check=True, capture_output=True, text=True
    )
    assert "gmmvit pack" in stat.stdout


def test_every_blob_has_the_hash_of_its_name(repository: Repository, tmp_path: Path) -> None:
    image = pack(repository.path, tmp_path / "image")
    blobs = list((image.path / "blobs" / "sha256").iterdir())
    assert len(blobs) == 3
    assert all(sha256_of_file(path) == path.name for path in blobs)
    index = json.loads((image.path / "index.json").read_bytes())
    assert [each["digest"] for each in index["manifests"]] == [image.digest]
    for described in (*index["manifests"], blob(image.path, image.digest)["config"]):
        stored = image.path / "blobs" / "sha256" / described["digest"].removeprefix("sha256:")
        assert stored.stat().st_size == described["size"]


def test_the_same_files_give_the_same_digest(repository: Repository, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(repository.path, copy, copy_function=shutil.copyfile)
    for number, path in enumerate(copy.rglob("*")):
        path.chmod(0o700)
        os.utime(path, (number, number))
    first = pack(repository.path, tmp_path / "first")
    assert pack(copy, tmp_path / "second").digest == first.digest
    (copy / "gmmvit" / "labels.txt").write_text("another\n")
    assert pack(copy, tmp_path / "third").digest != first.digest


def test_a_bundle_becomes_a_repository_with_the_tuned_settings(bundle: Bundle, tmp_path: Path) -> None:
    file = tuning_file(bundle, tmp_path / "tuned.json", instances=2, threads=0, cores=8)
    image = pack(bundle.path, tmp_path / "image", tuned=file)
    assert image.labels[BUNDLE_LABEL] == bundle.sha256
    layer = blob(image.path, image.digest)["layers"][0]["digest"].removeprefix("sha256:")
    with tarfile.open(image.path / "blobs" / "sha256" / layer) as stored:
        text = stored.extractfile("models/gmmvit_network/config.pbtxt").read().decode()
    assert 'key: "threads"' in text
    assert "count: 2" in text
    assert 'string_value: "4"' in text  # a thread for each core of the measurement, shared by two instances
    assert 'key: "chunk"\n  value {\n    string_value: "8"' in text
    assert "max_queue_delay_microseconds: 500" in text


def test_a_bundle_as_it_is(bundle: Bundle, tmp_path: Path) -> None:
    image = pack(bundle.path, tmp_path / "image", contents="bundle")
    assert image.labels["gmmvit.contents"] == "bundle"
    assert pack(bundle.path, tmp_path / "again", contents="bundle").digest == image.digest


@pytest.mark.process
def test_threads_that_are_not_stated_are_noted(bundle: Bundle, tmp_path: Path, gmmvit: Any) -> None:
    """Also the labels state instances and threads, which an operator writes into the manifests."""
    untuned = gmmvit("pack", bundle.path, "-o", tmp_path / "untuned")
    assert (untuned.returncode, "threads are not stated" in untuned.stderr) == (0, True), untuned.stderr
    file = tuning_file(bundle, tmp_path / "tuned.json")
    tuned = gmmvit("pack", bundle.path, "-o", tmp_path / "tuned", "--tuned", file)
    assert (tuned.returncode, "threads are not stated" in tuned.stderr) == (0, False), tuned.stderr
    for name, expected in (("untuned", ("1", "0")), ("tuned", ("2", "3"))):
        digest = {"untuned": untuned, "tuned": tuned}[name].stdout.strip()
        labels = blob(tmp_path / name, digest)["annotations"]
        assert (labels["gmmvit.instances"], labels["gmmvit.threads"]) == expected


def test_what_cannot_be_packed_is_refused(repository: Repository, bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--contents bundle needs a bundle"):
        pack(repository.path, tmp_path / "image", contents="bundle")
    file = tuning_file(bundle, tmp_path / "tuned.json", sha256="0" * 64)
    with pytest.raises(InputError, match="measured with the bundle 0000000000000000"):
        pack(bundle.path, tmp_path / "image", tuned=file)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="expected a file or a folder, got a link"):
        image_from_folder(tmp_path / "folder", tmp_path / "image", {})
    assert not (tmp_path / "image").exists()


def test_a_layer_is_a_tar_without_traces_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(b"content")
    image = image_from_folder(tmp_path / "folder", tmp_path / "image", {})
    layer = image.path / "blobs" / "sha256" / blob(image.path, image.digest)["layers"][0]["digest"][7:]
    # Frozen: another digest for the same file would break the promise for images that were packed before.
    assert (
        hashlib.sha256(layer.read_bytes()).hexdigest()
        == "bf5f3776ee1739bb849831594a1dc26075bf68e4b35702fdb067802cc8bb2f1f"
    )
