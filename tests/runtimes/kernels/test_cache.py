"""The cache of compiled kernels: what its key depends on, what it keeps, and failures that it records."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gmmvit_deploy import doctor
from gmmvit_deploy.runtimes.kernels import libraries
from gmmvit_deploy.runtimes.kernels.libraries import (
    MAX_LIBRARIES,
    TRY_AGAIN,
    compiled,
    empty_kernel_cache,
    openvino_library,
)


class Compiler:
    """A script in place of the compiler: it writes the output file and counts its runs."""

    def __init__(self, folder: Path) -> None:
        self.path, self.calls = folder / "cxx", folder / "calls"
        self.write(version="1.0")

    def write(self, *, version: str, fails: bool = False, error: str = "x.c:1: error: no") -> None:
        end = f"echo '{error}' >&2; exit 1" if fails else 'for last; do :; done; echo library > "$last"'
        self.path.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) echo "cxx {version}"; exit 0;; esac\n'
            f'echo "$@" >> {self.calls}\n{end}\n'
        )
        self.path.chmod(0o755)

    @property
    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    openvino_library.cache_clear()
    yield tmp_path / "cache" / "gmmvit-deploy" / "kernels"
    openvino_library.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def again() -> tuple[Path | None, str]:
    """Return the library as a process gets it that asks for the first time."""
    openvino_library.cache_clear()
    return openvino_library()


def test_the_key_knows_the_compiler_its_version_and_the_sources(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = [again()[0]]
    compiler.write(version="2.0")
    paths.append(again()[0])
    monkeypatch.setenv("CXX", f"{compiler.path} -march=x86-64")  # a compiler with arguments
    paths.append(again()[0])
    assert "-march=x86-64" in compiler.calls.read_text().splitlines()[-1]
    sources = tmp_path / "installed"
    shutil.copytree(libraries._HERE, sources)
    (sources / "masked_attention.h").write_text("/* changed */")
    monkeypatch.setattr(libraries, "_HERE", sources)
    paths.append(again()[0])
    assert None not in paths
    assert len(set(paths)) == compiler.count == 4


def test_a_failure_is_recorded_and_not_tried_again_until_the_cache_is_emptied(compiler: Compiler, folder: Path) -> None:
    compiler.write(version="1.0", fails=True)
    library, why = again()
    (record,) = folder.glob("*.failed")
    assert library is None
    assert why.startswith(f"the compiler {compiler.path} failed: x.c:1: error: no (recorded in {record}); type gmmvit")
    assert again() == (None, why)
    assert compiler.count == 1
    check = doctor._tried("kernel", "openvino+kernels", doctor._kernels, fix="")
    assert (check.works, check.fix, check.detail) == (False, TRY_AGAIN, why)
    compiler.write(version="1.0")
    assert again() == (None, why)
    assert empty_kernel_cache() == [record]
    assert openvino_library()[0] is not None


@pytest.mark.parametrize(
    "error",
    [
        "x.c:1:2: fatal error: error writing to /tmp/x.s: No space left on device",
        "c++: fatal error: Killed signal terminated program cc1plus",
        "cc1plus: out of memory allocating 65536 bytes",
        "",
    ],
)
def test_a_failure_that_is_not_the_sources_is_tried_again(compiler: Compiler, folder: Path, error: str) -> None:
    compiler.write(version="1.0", fails=True, error=error)
    library, why = again()
    assert library is None
    assert why.startswith(f"the compiler {compiler.path} failed: ")
    assert list(folder.glob("*.failed")) == []
    compiler.write(version="1.0")
    assert again()[0] is not None


def test_the_least_recently_used_are_removed(folder: Path) -> None:
    for age_s in range(MAX_LIBRARIES + 2, 0, -1):
        path = compiled(f"openvino-{age_s}", lambda path: path.touch())
        os.utime(path, (1_000_000_000 - age_s,) * 2)
    compiled("openvino-new", lambda path: path.touch())
    kept = {"openvino-new", *(f"openvino-{age_s}" for age_s in range(1, MAX_LIBRARIES))}
    assert {path.stem for path in folder.glob("*.so")} == kept


def test_the_command_empties_it(compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from gmmvit_cli.main import app

    monkeypatch.setattr(doctor, "examine", lambda on_progress: [] if openvino_library()[0] else None)
    compiler.write(version="1.0", fails=True)
    assert again()[0] is None
    compiler.write(version="1.0")
    answer = CliRunner().invoke(app, ["doctor", "--empty-kernel-cache"])
    assert answer.exit_code == 0
    assert "removed 1 file from the kernel cache" in answer.output
    assert len(list(folder.glob("*.so"))) == 1


def test_processes_that_compile_at_the_same_time_compile_once(compiler: Compiler, folder: Path) -> None:
    ask = "from gmmvit_deploy.runtimes.kernels.libraries import openvino_library as ask; print(ask()[0])"
    others = [
        subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        for _ in range(3)
    ]
    answers = {other.communicate(timeout=60)[0].strip() for other in others}
    (library,) = folder.glob("*.so")
    assert answers == {str(library)}
    assert compiler.count == 1
