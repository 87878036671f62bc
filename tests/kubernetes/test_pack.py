"""The build context of a model's image: a Dockerfile from scratch, the files, and labels that state what is inside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.kubernetes.pack import BUNDLE_LABEL, pack
from gmmvit_deploy.serving.repository import Repository
from tests.kubernetes.made import hadolint, tuning_file


def hashes(folder: Path) -> dict[Path, str]:
    return {path.relative_to(folder): sha256_of_file(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.integration
def test_a_repository_and_its_labels(repository: Repository, bundle: Bundle, tmp_path: Path) -> None:
    context = pack(repository.path, tmp_path / "image")
    assert {path.name for path in context.path.iterdir()} == {"Dockerfile", "models"}
    assert hashes(context.path / "models") == hashes(repository.path)
    text = (context.path / "Dockerfile").read_text()
    assert text.startswith(f'FROM scratch\nLABEL {BUNDLE_LABEL}="{bundle.sha256}"')
    assert text.endswith("\nCOPY models /models\n")
    assert hadolint(context.path / "Dockerfile") == ""


def test_a_bundle_becomes_a_repository_with_the_tuned_settings(bundle: Bundle, tmp_path: Path) -> None:
    file = tuning_file(bundle, tmp_path / "tuned.json", instances=2, threads=0, cores=8)
    text = (pack(bundle.path, tmp_path / "image", tuned=file).path / "models/gmmvit_network/config.pbtxt").read_text()
    assert 'key: "threads"' in text
    assert "count: 2" in text
    assert 'string_value: "4"' in text  # a thread for each core of the measurement, shared by two instances
    assert "max_queue_delay_microseconds: 500" in text


def test_a_bundle_as_it_is_with_files_that_every_user_can_read(bundle: Bundle, tmp_path: Path) -> None:
    private = tmp_path / "private"
    shutil.copytree(bundle.path, private)
    for path in (private, *private.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    context = pack(private, tmp_path / "image", contents="bundle")
    models = context.path / "models"
    assert context.labels["gmmvit.contents"] == "bundle"
    assert hashes(models) == hashes(bundle.path)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (models, *models.rglob("*"))}
    assert modes == {(True, 0o755), (False, 0o644)}


@pytest.mark.integration
def test_threads_that_are_not_stated_are_noted(bundle: Bundle, tmp_path: Path, gmmvit: Any) -> None:
    """Also the labels state instances and threads, which an operator writes into the manifests."""
    untuned = gmmvit("pack", bundle.path, "-o", tmp_path / "untuned")
    assert (untuned.returncode, "threads are not stated" in untuned.stderr) == (0, True), untuned.stderr
    file = tuning_file(bundle, tmp_path / "tuned.json")
    tuned = gmmvit("pack", bundle.path, "-o", tmp_path / "tuned", "--tuned", file)
    assert (tuned.returncode, "threads are not stated" in tuned.stderr) == (0, False), tuned.stderr
    for name, (instances, threads) in (("untuned", (1, 0)), ("tuned", (2, 3))):
        text = (tmp_path / name / "Dockerfile").read_text()
        assert f'gmmvit.instances="{instances}"' in text
        assert f'gmmvit.threads="{threads}"' in text


def test_what_cannot_be_packed_is_refused(repository: Repository, bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--contents bundle needs a bundle"):
        pack(repository.path, tmp_path / "image", contents="bundle")
    file = tuning_file(bundle, tmp_path / "tuned.json", sha256="0" * 64)
    with pytest.raises(InputError, match="measured with the bundle 0000000000000000"):
        pack(bundle.path, tmp_path / "image", tuned=file)
    assert not (tmp_path / "image").exists()
