from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.errors import InputError, MissingDependencyError
from gmmvit_deploy.runtimes.engines import flavors
from gmmvit_deploy.runtimes.engines.flavors import Flavor, Gpu, find_flavor, refuse
from gmmvit_deploy.runtimes.engines.options import BuildOptions, Profile, profile_from, trtexec_line

RTX = Flavor(name="tensorrt-rtx", version="1.7", capabilities=("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"))
TRT = Flavor(name="tensorrt", version="10.9", capabilities=())


def test_profiles() -> None:
    for text, expected in (("1:8:64", (1, 8, 64)), ("8", (8, 8, 8)), ("3:3:5", (3, 3, 5))):
        profile = profile_from(text)
        assert (profile.minimum, profile.optimum, profile.maximum) == expected
        assert profile_from(str(profile)) == profile
    for text in ("8:4:2", "1:8:4", "0:1:2", "0", "1:2", "1:2:3:4", "", "a", "-1:2:3", "1:8:64 "):
        with pytest.raises(InputError, match=r"expected"):
            profile_from(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp4"}, "'fp4' is not known"),
        ({"optimization_level": 6}, "expected 0 to 5"),
        ({"hardware_compatible": "all"}, "'all' is not known"),
        ({"workspace_mib": 0}, "expected at least 1"),
        ({"capabilities": ("89",)}, "expected a number such as 8.9"),
        ({"capabilities": ("8.9", "8.9")}, "expected each at most once"),
        ({"tf32": True, "precision": "fp16"}, "--tf32 is only for precision fp32"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BuildOptions(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capabilities": ()}, "no GPU to build for"),
        ({"capabilities": ("9.0",)}, "does not build for compute capability 9.0: Hopper"),
        ({"capabilities": ("8.6",), "precision": "fp8"}, "fp8 needs compute capability 8.9 or more, not 8.6"),
        ({"capabilities": ("7.5",)}, "no float32 matrix product, such as the classifier head, for compute capability"),
        ({"timing_cache": Path("x")}, "does not support --timing-cache"),
    ],
)
def test_what_rtx_cannot_do(changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flavors, "visible_gpu", lambda: None)
    with pytest.raises(InputError, match=message):
        refuse(BuildOptions(**{"capabilities": ("8.9",), **changes}), RTX)


@pytest.mark.parametrize(
    ("gpu", "changes", "message"),
    [
        (None, {}, "builds on the GPU that will run the engine, but this machine has no GPU"),
        ("8.9", {"capabilities": ("9.0",)}, "not for 9.0"),
        ("8.6", {"precision": "fp8"}, "fp8 needs compute capability 8.9 or more; a GPU has 8.6"),
        ("7.5", {"hardware_compatible": "ampere+"}, "needs an Ampere GPU or later"),
    ],
)
def test_what_tensorrt_cannot_do(
    gpu: str | None, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible = Gpu(name="a GPU", capability=gpu, driver="1") if gpu else None
    monkeypatch.setattr(flavors, "visible_gpu", lambda: visible)
    with pytest.raises(InputError, match=message):
        refuse(BuildOptions(**changes), TRT)


def test_auto_takes_what_can_build_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flavors, "visible_gpu", lambda: None)
    assert find_flavor("auto").name == "tensorrt-rtx"
    monkeypatch.setattr(flavors, "MODULES", {"tensorrt": "no_such_module_a", "tensorrt-rtx": "no_such_module_b"})
    with pytest.raises(MissingDependencyError) as caught:
        find_flavor("auto")
    assert caught.value.hint == "pip install 'gmmvit-deploy[tensorrt-rtx]'"
    monkeypatch.setattr(flavors, "MODULES", {"tensorrt": "tensorrt_rtx", "tensorrt-rtx": "no_such_module_b"})
    monkeypatch.setattr(flavors, "visible_gpu", lambda: Gpu(name="a GPU", capability="9.0", driver="1"))
    assert find_flavor("auto").name == "tensorrt"


def test_the_gpu_is_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert flavors.visible_gpu() is None
    tool.write_text("#!/bin/sh\necho 'NVIDIA L40S, 8.9, 580.1'\necho 'another, 9.0, 580.1'\n")
    tool.chmod(0o755)
    assert flavors.visible_gpu() == Gpu(name="NVIDIA L40S", capability="8.9", driver="580.1")
    tool.write_text("#!/bin/sh\necho 'no devices'\n")
    assert flavors.visible_gpu() is None


def test_the_trtexec_line_has_every_requested_option() -> None:
    options = BuildOptions(
        optimization_level=4,
        timing_cache=Path("t.cache"),
        version_compatible=True,
        hardware_compatible="same-cc",
        workspace_mib=512,
    )
    profiles = (Profile(minimum=1, optimum=1, maximum=1), Profile(minimum=2, optimum=8, maximum=64))
    line = trtexec_line(options, profiles, onnx="m.onnx", tensor="pixels", shape=(32, 32, 3), rtx=False)
    for part in (
        "trtexec --onnx=m.onnx",
        "--profile=0 --minShapes=pixels:1x32x32x3 --optShapes=pixels:1x32x32x3",
        "--profile=1 --minShapes=pixels:2x32x32x3 --optShapes=pixels:8x32x32x3 --maxShapes=pixels:64x32x32x3",
        "--builderOptimizationLevel=4",
        "--timingCacheFile=t.cache",
        "--versionCompatible",
        "--hardwareCompatibilityLevel=sameComputeCapability",
        "--memPoolSize=workspace:512MiB",
        "--noTF32",
    ):
        assert part in line
    tf32 = BuildOptions(precision="fp32", tf32=True, capabilities=("8.9", "12.0"))
    line = trtexec_line(tf32, profiles[:1], onnx="m.onnx", tensor="t", shape=(3, 8, 8), rtx=True)
    assert "--noTF32" not in line
    assert "--profile" not in line.replace("--profilingVerbosity", "")
    assert line.startswith("tensorrt_rtx ")
    assert "--computeCapabilities=8.9,12.0" in line
