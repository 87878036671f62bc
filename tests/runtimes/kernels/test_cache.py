"""The cache of compiled kernels: what its key depends on, and what processes that start together do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gmmvit_deploy.runtimes.kernels import libraries
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library


class Compiler:
    """A script in place of the compiler: it writes the output file and counts its runs."""

    def __init__(self, folder: Path) -> None:
        self.path, self.calls = folder / "cxx", folder / "calls"
        self.write(version="1.0")

    def write(self, *, version: str, fails: bool = False) -> None:
        end = "echo 'x.c:1: error: no' >&2; exit 1" if fails else 'for last; do :; done; echo library > "$last"'
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


def test_a_failure_is_a_reason_and_leaves_nothing(compiler: Compiler, folder: Path) -> None:
    compiler.write(version="1.0", fails=True)
    assert again() == (None, f"the compiler {compiler.path} failed: x.c:1: error: no")
    assert openvino_library()[0] is None
    assert compiler.count == 1  # a process tries once
    assert [path.name for path in folder.iterdir()] == ["compiling"]
    compiler.write(version="1.0")
    assert again()[0] is not None


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
