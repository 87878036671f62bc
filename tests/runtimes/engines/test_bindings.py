"""Every name and signature of TensorRT that the code uses, against the bindings themselves.

``tensorrt`` 11 needs a GPU and libraries that are not available everywhere; its bindings are. They are imported over
libraries that export only names, mypy's stubgen writes their signatures as stubs, and mypy checks the
code against the stubs. So the code for a flavor that cannot run here is still checked; ``tensorrt-rtx`` does run.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gmmvit_deploy.runtimes.engines

SOURCES = ("_build.py", "session.py")
LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
EXPORTED = [
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
]
# Names that only tensorrt-rtx has; the code uses them only when compute capabilities are given.
RTX_ALONE = {"ComputeCapability", "num_compute_capabilities", "set_compute_capability"}
# Conversions by pybind11 that a stub cannot express: integers, sequences for Dims, the buffer of IHostMemory.
CONVERSIONS = (
    ("typing.SupportsInt", "int"),
    (": Dims", ": Dims | collections.abc.Sequence[int]"),
    ("class Dims:", "class Dims:\n    def __iter__(self) -> collections.abc.Iterator[int]: ..."),
    ("class IHostMemory:", "class IHostMemory:\n    def __buffer__(self, flags: int, /) -> memoryview: ..."),
    ("class Builder:", "__version__: str\nclass Builder:"),
)


def write_stub_library(path: Path, symbols: list[str]) -> None:
    """Write a library that exports ``symbols`` as functions that do nothing."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]} here")
    command = [*compiler, "-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), "-"]
    subprocess.run(command, input="".join(f"void {name}(void) {{}}\n" for name in symbols), text=True, check=True)


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    return Path((spec.submodule_search_locations or [""])[0])


def written_down(module: str, out: Path, path: Path) -> Path:
    """Write the module's names and signatures as a stub package."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [Path(sys.executable).with_name("stubgen"), "--inspect-mode", "--quiet", "-m", module, "-o", out]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return out


pytestmark = [pytest.mark.integration, pytest.mark.nightly]  # mypy, over the sources


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a stub package called ``trt_names``."""
    root = tmp_path_factory.mktemp("names")
    copied = root / "bindings" / "tensorrt"
    shutil.copytree(package_folder("tensorrt_bindings"), copied)
    for library in LIBRARIES:
        write_stub_library(copied / library, EXPORTED)
    stub = written_down("tensorrt.tensorrt", root / "t", root / "bindings") / "tensorrt" / "tensorrt.pyi"
    folder = root / "stubs"
    folder.mkdir()
    text = "\n".join(map(repaired, stub.read_text().splitlines()))
    for original, replacement in CONVERSIONS:
        assert original in text, original
        text = text.replace(original, replacement)
    (folder / "trt_names.pyi").write_text(text)
    return folder


def repaired(line: str) -> str:
    """Replace a signature that is not valid Python (a default before a parameter without) by ``*args, **kwargs``."""
    try:
        ast.parse(line.strip())
    except SyntaxError:
        return re.sub(r"def (\w+)\(.*", r"def \1(self, *args, **kwargs): ...", line) if "def " in line else line
    return line


def problems(stubs: Path, folder: Path) -> list[str]:
    """Return mypy's errors about the code when ``library`` and ``trt`` are the flavor of ``stubs``."""
    folder.mkdir(exist_ok=True)
    home = Path(gmmvit_deploy.runtimes.engines.__path__[0])
    for name in SOURCES:
        text = (home / name).read_text().replace("import tensorrt as trt", "import trt_names as trt")
        text = text.replace("library: Any", "_library: object")
        text = re.sub(r"^(\s+)library = .*$", r"\1pass", text, flags=re.MULTILINE)
        text = text.replace(
            "from __future__ import annotations\n", "from __future__ import annotations\nimport trt_names as library\n"
        )
        (folder / f"checked_{name}").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--check-untyped-defs"]
    command += ["--follow-imports=silent", "--no-error-summary", f"--cache-dir={stubs / 'cache'}"]
    answer = subprocess.run(
        [*command, *map(str, sorted(folder.glob("checked_*.py")))],
        env={**os.environ, "MYPYPATH": str(stubs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "trt_names" not in answer.stderr, answer.stderr
    # Errors in the stubs themselves do not matter; the names that only tensorrt-rtx has prove that mypy read the stubs.
    return [line for line in answer.stdout.splitlines() if ": error:" in line and "checked_" in line]


def test_every_name_and_signature_is_that_of_tensorrt_11(names: Path, tmp_path: Path) -> None:
    stub = (names / "trt_names.pyi").read_text()
    assert "def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig)" in stub
    complaints = problems(names, tmp_path / "code")
    unknown = {re.search(r'(?:attribute|has no attribute) "(\w+)"', line)[1] for line in complaints}  # type: ignore[index]
    assert unknown == RTX_ALONE, complaints
