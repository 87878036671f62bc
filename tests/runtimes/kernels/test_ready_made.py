"""A ready-made library needs no compiler, gives the right answers, and is used only with the sources it is made of."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy import doctor
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.runtimes.kernels import libraries
from gmmvit_deploy.runtimes.kernels.libraries import onnxruntime_library, origin_of, ready_name
from gmmvit_deploy.runtimes.runners.open import open_runner
from tests.runtimes.kernels.test_masked_attention import needs_kernel

pytestmark = [needs_kernel, pytest.mark.process]
NAME = ready_name(Path(libraries.__file__).parent, platform.machine())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]} here, to make the library")
    path = tmp_path_factory.mktemp("made") / NAME
    libraries._compile(libraries._ONNXRUNTIME, compiler, path)
    return path


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of ready-made libraries, empty, on a machine without a compiler that has compiled nothing yet."""
    folder = tmp_path / "ready"
    folder.mkdir()
    monkeypatch.setattr(libraries, "READY_FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    onnxruntime_library.cache_clear()
    yield folder
    onnxruntime_library.cache_clear()


@pytest.mark.rest
def test_right_answers_without_a_compiler(ready: Path, made: Path, bundle: Bundle) -> None:
    shutil.copyfile(made, ready / NAME)
    assert onnxruntime_library() == (ready / NAME, "")
    inputs = fresh_inputs(bundle, 5)
    with open_runner("onnxruntime", bundle) as runner:
        expected = runner.run(inputs)
    with open_runner("onnxruntime+kernels", bundle) as runner:
        assert runner.settings["library of our kernel"] == "ready-made"
        np.testing.assert_allclose(runner.run(inputs), expected, atol=1e-4 * float(np.abs(expected).max()))
    check = doctor._kernels("onnxruntime", onnxruntime_library, lambda: "attention in f32")
    assert check.works
    assert check.detail.endswith(f"; ready-made: {ready / NAME}")


def test_a_library_of_other_sources_is_not_used(ready: Path, made: Path) -> None:
    other = f"onnxruntime-{platform.machine()}-0123456789abcdef.so"
    shutil.copyfile(made, ready / other)
    library, why = onnxruntime_library()
    assert library is None
    assert why.startswith("no C++ compiler: no-such-compiler")
    assert libraries._ready_made() == (None, f"the ready-made library {other} was made from other sources")


def test_a_library_that_cannot_be_loaded_is_compiled_instead(
    ready: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ready / NAME).write_bytes(b"no library")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(libraries, "_compile", lambda recipe, compiler, path: shutil.copyfile(made, path))
    library, _ = onnxruntime_library()
    assert library is not None
    assert library.parent != ready
    assert origin_of(library).startswith(f"compiled to {library}, because the ready-made library cannot be loaded: ")


@pytest.mark.usefixtures("ready")
def test_without_a_library_the_kernels_are_compiled(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(libraries, "_compile", lambda recipe, compiler, path: shutil.copyfile(made, path))
    library, _ = onnxruntime_library()
    assert library is not None
    why = f"this installation has no ready-made library for {platform.machine()}"
    assert origin_of(library) == f"compiled to {library}, because {why}"


def test_the_name_depends_on_every_source(tmp_path: Path) -> None:
    here = Path(libraries.__file__).parent
    for name in libraries.READY_SOURCES:
        shutil.copyfile(here / name, tmp_path / name)
    names = {ready_name(tmp_path, "x86_64")}
    assert names == {ready_name(here, "x86_64")}
    for name in libraries.READY_SOURCES:
        with (tmp_path / name).open("a", encoding="utf-8") as source:
            source.write("\n")
        names.add(ready_name(tmp_path, "x86_64"))
    assert len(names) == 1 + len(libraries.READY_SOURCES)
