"""The wheel of this platform runs the CPU kernels where there is no compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import openvino
import pytest
from release.archives import build, check_wheel
from release.compiled_kernels import PLATFORMS, check_symbols
from release.steps import ReleaseError, package_version, tracked_files

from tests.documented import ROOT
from tests.runtimes.kernels.test_masked_attention import graph

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

COMPILER = f"{platform.machine()}-linux-gnu-g++"
RUN = """
import shutil, sys
import numpy as np
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.programs.openvino import our_kernels, read_graph

assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc", "clang++")))
library, why = openvino_library()
if library is None:
    sys.exit(why)
graph, batch, answer = sys.argv[1:]
program = OpenVinoProgram(read_graph(graph), hint="f32", threads=1, kernels=our_kernels("fp32")[0])
assert program.fused_attentions == 1
np.save(answer, program.run(np.load(batch)))
print(library)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("these sources are not in a git checkout")
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} here")
    (name,) = (each for each in PLATFORMS if each.endswith(platform.machine()))
    return build(ROOT, tmp_path_factory.mktemp("dist"), [name]).wheels[1]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with the packages of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, wheel], check=True)
    (installed,) = folder.glob("lib/python*/site-packages")
    (installed / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def run_there(environment: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an attention in the environment, which alone is on PATH, with an empty cache."""
    openvino.save_model(graph(), folder / "attention.xml", compress_to_fp16=False)
    np.save(folder / "batch.npy", np.random.default_rng(2).standard_normal((3, 20, 96), dtype=np.float32))
    files = [folder / name for name in ("attention.xml", "batch.npy", "answer.npy")]
    foreign = ("PYTHON", "CXX", "XDG_", "GMMVIT_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    variables |= {"PATH": str(environment / "bin"), "HOME": str(folder)}
    return subprocess.run(
        [environment / "bin" / "python", "-c", RUN, *files],
        cwd=folder,
        env=variables,
        check=False,
        capture_output=True,
        text=True,
    )


def test_without_a_compiler_the_kernels_of_the_wheel_run(wheel: Path, environment: Path, tmp_path: Path) -> None:
    check_wheel(wheel, tracked_files(ROOT), package_version(ROOT))
    done = run_there(environment, tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(environment)
    assert not (tmp_path / ".cache").exists()
    plain = openvino.compile_model(graph(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), plain(np.load(tmp_path / "batch.npy"))[0], atol=1e-5)


def test_a_library_for_another_openvino_is_named(environment: Path, tmp_path: Path) -> None:
    (library,) = environment.rglob("openvino-*.so")
    other = library.rename(library.with_name("openvino-2026.0.0-0123456789abcdef.so"))
    done = run_there(environment, tmp_path)
    other.rename(library)
    assert done.returncode == 1
    assert "no C++ compiler: c++ is not installed; install g++" in done.stderr
    assert ", or OpenVINO 2026.0.0: the wheel's library is not for " in done.stderr


def test_a_library_that_its_platform_cannot_load_is_refused(environment: Path) -> None:
    (library,) = environment.rglob("openvino-*.so")
    with pytest.raises(ReleaseError, match=r"needs GLIBC_2\.\d+, which its platform does not have"):
        check_symbols(library, {"GLIBC": (2, 0), "GLIBCXX": (4,), "CXXABI": (2,)})
