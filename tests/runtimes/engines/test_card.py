from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import EngineError, InputError
from gmmvit_deploy.runtimes.engines.card import Engine, EngineCard, open_engine, require_bundle
from gmmvit_deploy.runtimes.engines.compatibility import loads_in, loads_on, runs_on, server_tensorrt
from gmmvit_deploy.runtimes.engines.flavors import Gpu
from gmmvit_deploy.runtimes.engines.options import Profile
from gmmvit_deploy.runtimes.engines.releases import OLDEST_WITHOUT_FAULTS, RELEASES, triton_in_words
from gmmvit_deploy.serving.server_wheel import TRITON


def edited(path: Path, **changes: object) -> None:
    data = json.loads((path / "card.json").read_text())
    (path / "card.json").write_text(json.dumps({**data, **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "card.json").unlink(), "holds no card.json"),
        (lambda p: (p / "model.plan").unlink(), "model.plan is missing"),
        (
            lambda p: (p / "model.plan").write_bytes((p / "model.plan").read_bytes()[:1000]),
            "bytes, got 1000: the plan is truncated",
        ),
        (
            lambda p: (p / "model.plan").write_bytes(b"x" + (p / "model.plan").read_bytes()[1:]),
            "the plan was changed or damaged",
        ),
        (lambda p: (p / "card.json").write_text("{"), "expected the build report of an engine"),
        (lambda p: edited(p, format="gmmvit-engine/9"), "expected format 'gmmvit-engine/1'"),
        (lambda p: edited(p, profiles=["8:4:2"]), "expected the build report of an engine"),
    ],
)
def test_an_engine_that_is_not_whole(damage: object, message: str, engine: Engine, tmp_path: Path) -> None:
    shutil.copytree(engine.path, tmp_path / "e")
    damage(tmp_path / "e")
    with pytest.raises(EngineError, match=message):
        open_engine(tmp_path / "e")


def test_what_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not exist"):
        open_engine(tmp_path / "nothing")
    (tmp_path / "x.plan").write_bytes(b"plan")
    with pytest.raises(EngineError, match="has no build report"):
        open_engine(tmp_path / "x.plan")


def test_an_engine_belongs_to_its_bundle(
    engine: Engine, precise_bundle: Bundle, tensor_bundles: dict[str, Bundle]
) -> None:
    require_bundle(precise_bundle, engine)
    with pytest.raises(EngineError, match="got an engine built from bundle"):
        require_bundle(tensor_bundles["vit_gmm"], engine)
    orphan = Engine(path=engine.path, card=replace(engine.card, sha256={"plan": "", "onnx": ""}))
    with pytest.raises(EngineError, match="an ONNX file that belongs to no bundle"):
        require_bundle(precise_bundle, orphan)


def test_a_batch_has_its_profile(engine: Engine) -> None:
    card = replace(
        engine.card, profiles=(Profile(minimum=1, optimum=1, maximum=1), Profile(minimum=4, optimum=8, maximum=16))
    )
    assert [card.profile_for(batch) for batch in (1, 4, 16)] == [0, 1, 1]
    assert card.max_batch == 16
    for batch in (0, 2, 17):
        with pytest.raises(
            InputError, match=rf"expected a batch of 1\.\.1, 4\.\.16 images, as in the engine's profiles, got {batch}"
        ):
            card.profile_for(batch)


def card_of(engine: Engine, version: str, *, compatible: bool = False, flavor: str = "tensorrt") -> EngineCard:
    flags = {**engine.card.flags, "version_compatible": compatible}
    return replace(engine.card, flavor=flavor, tensorrt_version=version, flags=flags)


@pytest.mark.parametrize(
    ("built", "compatible", "there", "loads"),
    [
        ("10.9.0.34", False, "10.9.0", True),
        ("10.9.0.34", False, "10.9.0.35", False),
        ("10.9.0.34", False, "10.8.0", False),
        ("10.8.0.43", True, "10.9.0", True),
        ("10.8.0.43", True, "10.7.0", False),
        ("10.8.0.43", True, "11.0.0", False),
    ],
)
def test_which_tensorrt_loads_a_plan(built: str, compatible: bool, there: str, loads: bool, engine: Engine) -> None:
    card = card_of(engine, built, compatible=compatible)
    assert (loads_in(card, there) == "") == loads
    server = server_tensorrt(tensorrt=there)
    reason = loads_on(card, server)
    assert (reason == "") == loads
    if reason:
        assert f"build the engine again with tensorrt {there}" in reason


@pytest.mark.parametrize(
    ("capability", "level", "runs"),
    [
        ("8.9", "none", True),
        ("9.0", "none", False),
        ("9.0", "same-cc", False),
        ("9.0", "ampere+", True),
        ("7.5", "ampere+", False),
    ],
)
def test_which_gpu_runs_an_engine(capability: str, level: str, runs: bool, engine: Engine) -> None:
    card = replace(engine.card, flags={**engine.card.flags, "hardware_compatible": level})
    reason = runs_on(card, Gpu(name="a GPU", capability=capability, driver="1"))
    assert (reason == "") == runs
    assert runs or f"compute capability 8.9; a GPU has {capability}" in reason


def test_servers_and_their_tensorrt() -> None:
    assert server_tensorrt(release="25.04").version == "10.9.0"
    assert server_tensorrt(triton="2.51.0", name="here").version == "10.5.0"
    assert server_tensorrt(triton="9.9.9", tensorrt="11.1").version == "11.1"
    for options, message in (
        ({"release": "26.09"}, "the TensorRT of Triton 26.09 is not known"),
        ({"triton": "9.9.9"}, "the TensorRT version of Triton 9.9.9 is not known"),
        ({"tensorrt": "ten"}, "expected a version"),
        ({}, "the server's TensorRT version is not known"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            server_tensorrt(**options)
        assert caught.value.hint


# ---- what is said of a version of Triton -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "name", "faults"),
    [
        (TRITON, "Triton 2.51.0 (release 24.10)", True),
        ("2.59.1", "Triton 2.59.1 (release 25.07)", True),
        ("2.70.9", "Triton 2.70.9 has", True),
        (RELEASES[OLDEST_WITHOUT_FAULTS][0], f"Triton 2.71.0 (release {OLDEST_WITHOUT_FAULTS})", False),
        ("2.100.0dev", "Triton 2.100.0dev has", False),
        ("3.0.0", "Triton 3.0.0 has", False),
    ],
)
def test_versions_before_the_oldest_release_without_faults_have_some(version: str, name: str, faults: bool) -> None:
    words = triton_in_words(version)
    assert words.startswith(name)
    assert ("has published faults" in words, "has no fault" in words) == (faults, not faults)
