"""The light parts of `make release`, with a real build of both archives.

Installing the wheel into empty environments is left to `make release`: each environment gets a PyTorch.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from release.archives import Archives, build, check_metadata, check_sdist, check_wheel
from release.steps import ReleaseError, check_committed, package_version, supported_pythons, tracked_files

from tests.documented import ROOT

pytestmark = pytest.mark.nightly

needs_a_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these sources are not in a git checkout")


def repository_with(folder: Path, names: Iterable[str]) -> Path:
    """Make ``folder`` a git repository with these files of the project, committed."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    author = ("-c", "user.name=A Tester", "-c", "user.email=tester@example.org")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    settings = {**inherited, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for words in ("init --quiet", "add --all --force", "commit --quiet --message Files"):
        subprocess.run(["git", *author, *words.split()], cwd=folder, check=True, env=settings)
    return folder


def test_supported_pythons_are_those_of_the_makefile() -> None:
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("PYTHON ?="))
    assert set(supported_pythons(ROOT)) == set(re.findall(r"python(3\.\d+)", line))


def test_uncommitted_files_are_refused(tmp_path: Path) -> None:
    repository = repository_with(tmp_path, ["CHANGELOG.md", "LICENSE"])
    check_committed(repository)
    (repository / "notes.txt").touch()
    with pytest.raises(ReleaseError, match=r"1 files are not committed, the first is notes\.txt"):
        check_committed(repository)
    (repository / "LICENSE").unlink()
    assert tracked_files(repository) == ["CHANGELOG.md"]


@needs_a_checkout
def test_a_link_to_a_folder_stands_for_its_files() -> None:
    assert "model_repository/gmmvit_network/1/gmmvit_inference/cores.py" in tracked_files(ROOT)


@dataclass(frozen=True)
class Built:
    archives: Archives
    tracked: list[str]
    version: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Archives of a working tree in which other files lie too, ignored by git and not."""
    repository = repository_with(tmp_path_factory.mktemp("repository"), tracked_files(ROOT))
    for name in (
        "notes.txt",
        "gmmvit_deploy/notes.py",
        "gmmvit_deploy/runtimes/kernels/library.so",
        "demo-output/page.html",
    ):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).touch()
    archives = build(repository, tmp_path_factory.mktemp("dist"), platforms=[])
    return Built(archives, tracked_files(repository), package_version(repository))


@needs_a_checkout
@pytest.mark.integration
def test_archives_hold_the_tracked_files_and_no_others(built: Built) -> None:
    check_metadata(built.archives)
    check_wheel(built.archives.wheels[0], built.tracked, built.version)
    check_sdist(built.archives.sdist, built.tracked, built.version)


@needs_a_checkout
@pytest.mark.integration
def test_a_missing_and_a_foreign_file_are_named(built: Built, tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "changed.whl", tmp_path / "changed.tar.gz"
    with zipfile.ZipFile(built.archives.wheels[0]) as before, zipfile.ZipFile(wheel, "w") as after:
        for name in before.namelist():
            if name != "gmmvit_deploy/py.typed":
                after.writestr(name, before.read(name))
        after.writestr("gmmvit_deploy/notes.py", "")
    problems = r"missing: gmmvit_deploy/py\.typed; does not belong: gmmvit_deploy/notes\.py"
    with pytest.raises(ReleaseError, match=rf"changed\.whl: {problems}"):
        check_wheel(wheel, built.tracked, built.version)

    top = f"gmmvit_deploy-{built.version}"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in (*built.tracked, "notes.txt"):
            archive.addfile(tarfile.TarInfo(f"{top}/{name}"), io.BytesIO())
    with pytest.raises(ReleaseError, match=rf"missing: {top}/PKG-INFO; does not belong: {top}/notes\.txt"):
        check_sdist(sdist, built.tracked, built.version)
