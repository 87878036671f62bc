"""The light parts of `make release`, with a real build of both archives.

Installing the wheel into empty environments is left to `make release`: each environment gets a PyTorch.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from release import __main__ as release
from release.archives import Archives, build, check_metadata, check_sdist, check_wheel
from release.steps import (
    ReleaseError,
    check_changelog,
    check_committed,
    package_version,
    supported_pythons,
    tracked_files,
)
from release.wheel_in_use import TOLERANCE, find_python, largest_difference, probabilities, serving

from tests.repositories import ROOT, repository_with

pytestmark = pytest.mark.nightly

needs_a_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these sources are not in a git checkout")


# --- version and changelog ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "version", "rehearsal"),
    [
        ("## [0.2.0] - 2026-01-31", "0.2.0", False),
        ("## [0.2.0] - 2026-01-31", "0.2.0", True),
        ("## [Unreleased]", "0.2.0.dev1", False),
        ("## [Unreleased]", "0.2.0", True),
    ],
)
def test_heading_and_version_agree(heading: str, version: str, rehearsal: bool) -> None:
    check_changelog(f"# Changelog\n\n{heading}\n\n## [0.1.0] - 2025-01-01\n", version, rehearsal=rehearsal)


@pytest.mark.parametrize(
    ("heading", "version", "rehearsal", "message"),
    [
        ("## [Unreleased]", "0.2.0", False, "version 0.2.0 needs '## [0.2.0] - YYYY-MM-DD' as the topmost heading"),
        ("## [0.1.0] - 2026-01-31", "0.2.0", False, "names version 0.1.0, gmmvit_deploy/__init__.py has 0.2.0"),
        ("## [0.1.0] - 2026-01-31", "0.2.0", True, "names version 0.1.0, gmmvit_deploy/__init__.py has 0.2.0"),
        ("## [0.1.0] - 2026-01-31", "0.2.0.dev1", False, "names version 0.1.0"),
        ("## [0.2.0]", "0.2.0", False, "got '## [0.2.0]'"),
        ("## [Unreleased] - 2026-01-31", "0.2.0", True, "got '## [Unreleased] - 2026-01-31'"),
        ("## 0.2.0", "0.2.0", True, "got '## 0.2.0'"),
        ("Nothing yet", "0.2.0", True, "got no heading"),
    ],
)
def test_heading_and_version_disagree(heading: str, version: str, rehearsal: bool, message: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape(message)):
        check_changelog(f"# Changelog\n\n{heading}\n", version, rehearsal=rehearsal)


def test_the_changelog_of_this_checkout_agrees_with_its_version() -> None:
    check_changelog((ROOT / "CHANGELOG.md").read_text(), package_version(ROOT), rehearsal=True)


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


# --- archives -----------------------------------------------------------------------------------------------------


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
    archives = build(repository, tmp_path_factory.mktemp("dist"))
    return Built(archives, tracked_files(repository), package_version(repository))


@needs_a_checkout
@pytest.mark.integration
def test_archives_hold_the_tracked_files_and_no_others(built: Built) -> None:
    check_metadata(built.archives)
    check_wheel(built.archives.wheel, built.tracked, built.version)
    check_sdist(built.archives.sdist, built.tracked, built.version)


@needs_a_checkout
@pytest.mark.integration
def test_a_missing_and_a_foreign_file_are_named(built: Built, tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "changed.whl", tmp_path / "changed.tar.gz"
    with zipfile.ZipFile(built.archives.wheel) as before, zipfile.ZipFile(wheel, "w") as after:
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


@needs_a_checkout
@pytest.mark.integration
def test_a_wheel_without_a_description_is_refused(built: Built, tmp_path: Path) -> None:
    wheel = tmp_path / built.archives.wheel.name
    with zipfile.ZipFile(built.archives.wheel) as before, zipfile.ZipFile(wheel, "w") as after:
        for name in before.namelist():
            text = before.read(name)
            if name.endswith("dist-info/METADATA"):
                lines = text.partition(b"\n\n")[0].splitlines(keepends=True)
                text = b"".join(line for line in lines if not line.startswith(b"Description-Content-Type"))
            after.writestr(name, text)
    with pytest.raises(ReleaseError, match="check the metadata: ") as error:
        check_metadata(replace(built.archives, wheel=wheel))
    assert "long_description" in error.value.hint


# --- the wheel in use ---------------------------------------------------------------------------------------------


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.integration
def test_a_python_that_is_not_there_gets_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_python(f"3.{sys.version_info.minor}") == Path(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert find_python("3.99") == "there is no python3.99 on PATH or in pyenv"
    stand_in = program(tmp_path / "python3.98", "#!/bin/sh\necho 'python3.98: command not found' >&2\nexit 127\n")
    assert find_python("3.98") == f"{stand_in} cannot be used: python3.98: command not found"
    other = program(tmp_path / "python3.97", "#!/bin/sh\necho 3.96\n")
    assert find_python("3.97") == f"{other} cannot be used: 3.96"
    broken = program(tmp_path / "python3.96", f"#!{sys.executable}\nimport no_such_module\n")
    assert find_python("3.96") == f"{broken} cannot be used: ModuleNotFoundError: No module named 'no_such_module'"


def answers(frog: float) -> dict[str, dict[str, float]]:
    predictions = [{"label": "frog", "probability": frog}, {"label": "ship", "probability": 1 - frog}]
    return probabilities(json.dumps([{"path": "images/0.png", "predictions": predictions}]))


def test_answers_are_compared_class_by_class() -> None:
    assert largest_difference(answers(0.25), answers(0.25 + TOLERANCE / 2), "grpc") == pytest.approx(TOLERANCE / 2)
    with pytest.raises(ReleaseError, match=r"http: probabilities differ .* by 2\.0e-05; expected at most 1e-05"):
        largest_difference(answers(0.25), answers(0.25 + 2 * TOLERANCE), "http")
    with pytest.raises(ReleaseError, match=r"0\.png: expected the labels \['frog', 'ship'\], got \['frog'\]"):
        largest_difference(answers(0.25), {"0.png": {"frog": 0.25}}, "grpc")
    for expected, got in (({}, {}), (answers(0.25), {}), ({}, answers(0.25))):
        with pytest.raises(ReleaseError, match="grpc: expected answers for"):
            largest_difference(expected, got, "grpc")


_SERVER = f"""#!{sys.executable}
import json, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(STATUS))
print(json.dumps({{"grpc": "grpc://localhost:1", "http": "http://localhost:2", "pid": PID}}, indent=1), flush=True)
time.sleep(60)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("status", "pid", "message"),
    [
        ("0", "2**22 + 1", ""),  # a process id beyond Linux's largest
        ("7", "2**22 + 1", "expected status 0 and no server after SIGTERM, got 7"),
        ("0", "1", "got 0; server 1 runs"),
    ],
    ids=["stops", "fails", "leaves its server"],
)
def test_the_server_must_stop_and_leave_no_process(tmp_path: Path, status: str, pid: str, message: str) -> None:
    gmmvit = program(tmp_path / "gmmvit", _SERVER.replace("STATUS", status).replace("PID", pid))

    def serve() -> None:
        with serving(str(gmmvit), tmp_path) as urls:
            assert urls == {"grpc": "grpc://localhost:1", "http": "http://localhost:2"}

    if message:
        with pytest.raises(ReleaseError, match=message):
            serve()
    else:
        serve()


def test_a_server_that_does_not_start_gets_its_log(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("no model could be loaded\n")
    gmmvit = program(tmp_path / "gmmvit", "#!/bin/sh\nexit 1\n")
    refused = pytest.raises(ReleaseError, match="ended before the server was ready")
    with refused as error, serving(str(gmmvit), tmp_path):
        pytest.fail("the server never started")
    assert error.value.hint == "no model could be loaded"


# --- the whole command --------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of a version 0.2.0 that is ready, but its changelog; the heavy steps are left out."""
    names = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "gmmvit_deploy/__init__.py"]
    repository = repository_with(tmp_path / "checkout", names)
    (repository / "gmmvit_deploy" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (repository / "CHANGELOG.md").write_text("## [Unreleased]\n")
    wheel = tmp_path / "archive"
    wheel.touch()
    monkeypatch.setattr(release, "_ROOT", repository)
    monkeypatch.setattr(release, "build", lambda root, out: Archives(sdist=wheel, wheel=wheel))
    for step in ("check_metadata", "check_sdist", "check_wheel"):
        monkeypatch.setattr(release, step, lambda *arguments: None)
    monkeypatch.setattr(release, "use_wheel", lambda *arguments: "8 images")
    monkeypatch.setattr(release, "find_python", lambda version: Path("p") if version == "3.11" else "it is not there")
    return repository


def test_a_release_needs_its_heading(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([]) == 1
    printed = capsys.readouterr().err
    assert "Error: CHANGELOG.md: version 0.2.0 needs '## [0.2.0] - YYYY-MM-DD'" in printed
    assert "hint: rename the heading, or rehearse: make release ARGS=--rehearsal" in printed


def test_a_release_needs_a_commit(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "CHANGELOG.md").write_text("## [0.2.0] - 2026-01-31\n")
    assert release.main([]) == 1
    assert "2 files are not committed" in capsys.readouterr().err


def test_pythons_that_were_not_tried_are_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--rehearsal"]) == 0
    printed = capsys.readouterr().out
    assert "a rehearsal: do not upload these archives" in printed
    assert "Python 3.12: NOT TRIED: it is not there" in printed
    assert printed.splitlines()[-1] == "used with Python 3.11; NOT TRIED with 3.12, 3.13, 3.14"
