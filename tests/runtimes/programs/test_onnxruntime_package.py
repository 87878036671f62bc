"""One ONNX Runtime in an environment: neither, and both, are refused with the command that mends the environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import tool_versions
from gmmvit_deploy.errors import GmmvitError, MissingDependencyError
from gmmvit_deploy.runtimes.programs import onnxruntime
from gmmvit_deploy.runtimes.programs.onnxruntime import require_onnxruntime, session_from_onnx

HERE = require_onnxruntime()
OTHER = "onnxruntime-gpu" if HERE.startswith("onnxruntime ") else "onnxruntime"


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the metadata of the other distribution on the path, as its installation does."""
    folder = tmp_path / f"{OTHER.replace('-', '_')}-1.31.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {OTHER}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the installed ONNX Runtime: its metadata, and its files from the search for modules."""
    monkeypatch.setattr(onnxruntime, "_DISTRIBUTIONS", ("no-such-distribution",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_both_packages_are_refused_with_the_command_that_mends(both: Path) -> None:
    with pytest.raises(GmmvitError, match=r"onnxruntime \S+ and onnxruntime-gpu \S+ are both installed") as caught:
        session_from_onnx(b"", "graph")
    assert HERE in str(caught.value)
    assert f"{OTHER} 1.31.1" in str(caught.value)
    assert caught.value.hint == (
        "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'gmmvit-deploy[cpu]', "
        "or pip install 'gmmvit-deploy[gpu]' on a machine with an NVIDIA GPU"
    )
    assert tool_versions()[OTHER] == "1.31.1"


@pytest.mark.usefixtures("neither")
def test_neither_package_names_both_extras() -> None:
    with pytest.raises(MissingDependencyError, match="onnxruntime is not installed") as caught:
        session_from_onnx(b"", "graph")
    assert "'gmmvit-deploy[cpu]'" in caught.value.hint
    assert "'gmmvit-deploy[gpu]'" in caught.value.hint


def test_extras_that_go_with_either_package_install_neither() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]

    def distributions(extra: str) -> set[str]:
        names: set[str] = set()
        for line in extras[extra]:
            name, _, others = re.split(r"[<>=~; ]", line)[0].partition("[")
            own = name == "gmmvit-deploy"
            names |= set().union(*map(distributions, others.rstrip("]").split(","))) if own else {name}
        return names

    packages = {"onnxruntime", "onnxruntime-gpu"}
    installed = {extra: distributions(extra) & packages for extra in extras}
    assert installed["gpu"] == {"onnxruntime-gpu"}
    assert {extra for extra, names in installed.items() if names == {"onnxruntime"}} == {"cpu", "demo", "dev"}
    assert all(len(names) < 2 for names in installed.values())


@pytest.mark.integration
def test_files_that_another_distribution_removed(tmp_path: Path) -> None:
    """Uninstalling one distribution leaves an empty package of the other, which Python imports as a namespace."""
    (tmp_path / "onnxruntime").mkdir()
    folder = tmp_path / "onnxruntime-1.31.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: onnxruntime\nVersion: 1.31.1\n")
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from gmmvit_deploy.errors import GmmvitError\n"
        "from gmmvit_deploy.runtimes.programs.onnxruntime import import_onnxruntime\n"
        "sys.path = [sys.argv[1], *(entry for entry in sys.path if not Path(entry, 'onnxruntime').is_dir())]\n"
        "try:\n    import_onnxruntime()\n"
        "except GmmvitError as exc:\n    print(json.dumps([str(exc), exc.hint]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    message, hint = json.loads(answer.stdout)
    assert message == "onnxruntime 1.31.1: files of the package are missing"
    assert hint.startswith("pip uninstall -y onnxruntime onnxruntime-gpu")
