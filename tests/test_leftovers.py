"""What killed processes leave behind is removed; what living processes use is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gmmvit_deploy.errors import OutputError
from gmmvit_deploy.files.leftovers import (
    new_run_folder,
    remove_leftovers,
    remove_run_folder,
    remove_unlocked,
    temporary_folder,
)
from gmmvit_deploy.files.writing import new_file, new_folder

pytestmark = pytest.mark.integration
WAITING = "import sys, time; print('waits', flush=True); time.sleep(600)"
IN_A_FOLDER = f"""
from gmmvit_deploy.files.leftovers import temporary_folder
with temporary_folder("test") as folder:
    (folder / "content").write_text("x")
    {WAITING}
"""
IN_A_BUNDLE = f"""
import sys
from pathlib import Path
from gmmvit_deploy.files.writing import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "content").write_text("x")
    {WAITING}
"""
IN_A_FILE = f"""
import sys
from pathlib import Path
from gmmvit_deploy.files.writing import new_file
with new_file(Path(sys.argv[1])) as file:
    file.write(b"x")
    {WAITING}
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Runs a program up to the line that it prints."""
    running: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: Path, temporary: Path | None = None) -> subprocess.Popen[str]:
        environment = {**os.environ, **({"TMPDIR": str(temporary)} if temporary else {})}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        return process

    yield start
    for process in running:
        if process.poll() is None:
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_folders_and_shared_memory_of_killed_processes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = start(IN_A_FOLDER, temporary=tmp_path)
    (of_killed,) = tmp_path.iterdir()
    start(IN_A_FOLDER, temporary=tmp_path)
    (of_living,) = set(tmp_path.iterdir()) - {of_killed}
    (tmp_path / "gmmvit-run-link").symlink_to(of_living)
    regions = [Path("/dev/shm") / f"{folder.name}-region" for folder in (of_killed, of_living)]
    for region in regions:
        region.write_bytes(b"x")
    try:
        assert remove_leftovers() == []
        kill(killed)
        assert of_killed.exists()
        assert remove_leftovers() == [of_killed]
        assert [region.exists() for region in regions] == [False, True]
        assert (of_living / "content").exists()
    finally:
        for region in regions:
            region.unlink(missing_ok=True)


def test_a_folder_is_kept_while_a_process_that_inherited_its_lock_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server that outlives the killed ``gmmvit serve`` for some seconds."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, lock = new_run_folder("test")
    heir = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True, pass_fds=(lock,))
    os.close(lock)
    assert remove_leftovers() == []
    kill(heir)
    assert remove_leftovers() == [folder]


def test_the_next_folder_removes_leftovers(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for next_folder in (lambda: temporary_folder("next"), lambda: new_folder(tmp_path / "bundle")):
        kill(start(IN_A_FOLDER, temporary=tmp_path))
        with next_folder():
            assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "bundle"]


@pytest.mark.parametrize(("code", "write"), [(IN_A_BUNDLE, new_folder), (IN_A_FILE, new_file)], ids=["folder", "file"])
def test_partial_output_beside_a_bundle(code: str, write: Callable[..., object], start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = start(code, out)
    (of_killed,) = tmp_path.iterdir()
    start(code, out)
    kill(killed)
    (tmp_path / ".other.partial-12345678").mkdir()  # of another name
    (of_living,) = set(tmp_path.iterdir()) - {of_killed, tmp_path / ".other.partial-12345678"}
    with write(out):  # type: ignore[attr-defined]
        names = set(tmp_path.iterdir())
        assert of_killed not in names
        assert of_living in names
    assert out.exists()
    assert set(tmp_path.iterdir()) == {out, of_living, tmp_path / ".other.partial-12345678"}


@pytest.mark.parametrize("replaced", [False, True], ids=["put back", "removed"])
def test_a_folder_that_a_killed_process_was_replacing(replaced: bool, tmp_path: Path) -> None:
    """Killed between the two renames of --force, the old bundle is the only bundle; later, it is removed."""
    for parent in (tmp_path / ".bundle.replaced-12345678", *([tmp_path] if replaced else [])):
        (parent / "bundle").mkdir(parents=True)
        (parent / "bundle" / "content").write_text("new" if parent == tmp_path else "old")
    with pytest.raises(OutputError, match="bundle exists"), new_folder(tmp_path / "bundle"):
        pass
    assert (tmp_path / "bundle" / "content").read_text() == ("new" if replaced else "old")
    assert list(tmp_path.iterdir()) == [tmp_path / "bundle"]


def test_an_owner_that_loses_its_new_folder_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may remove the folder between its creation and its lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real, lost = tempfile.mkdtemp, []

    def made(**options: object) -> str:
        folder = real(**options)  # type: ignore[call-overload]
        if not lost:
            lost.append(folder)
            assert remove_unlocked(tmp_path, "gmmvit-run-") == [Path(folder)]
        return str(folder)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    folder, lock = new_run_folder("test")
    assert lost != [str(folder)]
    assert folder.is_dir()
    remove_run_folder(folder, lock)
