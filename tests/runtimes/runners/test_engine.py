from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import EngineError, GmmvitError, InputError
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.engines.card import Engine
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_bundle
from gmmvit_deploy.runtimes.engines.flavors import Gpu, find_flavor, refuse, visible_gpu
from gmmvit_deploy.runtimes.engines.options import BuildOptions, profile_from
from gmmvit_deploy.runtimes.runners._engine import EngineRunner
from gmmvit_deploy.runtimes.runners.open import open_runner

NO_GPU = visible_gpu() is None


@pytest.mark.nightly
@pytest.mark.skipif(not NO_GPU, reason="a GPU is here")
def test_without_a_gpu_the_error_names_the_gpu(engine: Engine, precise_bundle: Bundle) -> None:
    with pytest.raises(EngineError, match="an engine runs on an NVIDIA GPU, but PyTorch sees no GPU here"):
        EngineRunner(precise_bundle, engine)


def test_an_engine_of_another_bundle_is_refused(engine: Engine, tensor_bundles: dict[str, Bundle]) -> None:
    with pytest.raises(EngineError, match="got an engine built from bundle"):
        EngineRunner(tensor_bundles["vit_gmm"], engine)


def test_an_engine_of_another_version_is_refused(engine: Engine, precise_bundle: Bundle) -> None:
    old = Engine(path=engine.path, card=replace(engine.card, tensorrt_version="1.0.0.1"))
    with pytest.raises(
        EngineError, match=r"the plan was built by tensorrt-rtx 1\.0\.0\.1; expected the same version to load the plan"
    ) as caught:
        EngineRunner(precise_bundle, old)
    assert "gmmvit build" in caught.value.hint


def test_an_engine_of_another_gpu_is_refused(
    engine: Engine, precise_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = Gpu(name="NVIDIA H200", capability="9.0", driver="580")
    monkeypatch.setattr("gmmvit_deploy.runtimes.runners._engine.visible_gpu", lambda: hopper)
    with pytest.raises(EngineError, match=r"built for compute capability 8\.9; NVIDIA H200 has 9\.0"):
        EngineRunner(precise_bundle, engine)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tensorrt", {}, "runner tensorrt needs an engine"),
        ("tensorrt", {"engine": "E"}, "expected an engine of tensorrt, got an engine of tensorrt-rtx"),
        ("onnxruntime", {"engine": "E"}, "runner onnxruntime takes no engine"),
        ("eager", {"precision": "fp16"}, "runner eager has a fixed precision"),
    ],
)
def test_runners_and_what_goes_with_them(
    name: str, options: dict[str, object], message: str, engine: Engine, precise_bundle: Bundle
) -> None:
    given = {key: engine.path if value == "E" else value for key, value in options.items()}
    with pytest.raises(InputError, match=message):
        open_runner(name, precise_bundle, **given)


def here() -> BuildOptions:
    """Return options of an engine for the GPU of this machine, with two profiles."""
    return BuildOptions(
        precision="fp16",
        profiles=(profile_from("1"), profile_from("2:4:8")),
        require_fused=True,
        require_precision=True,
    )


@pytest.fixture(scope="module")
def local_engine(precise_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Built on the GPU that runs the tests."""
    try:
        flavor = find_flavor("auto")
        refuse(here(), flavor)
    except GmmvitError as exc:
        pytest.skip(f"nothing here builds for this GPU: {exc}")
    out = tmp_path_factory.mktemp("local") / "engine"
    return engine_from_bundle(
        precise_bundle, open_variant(precise_bundle, "fp16"), here(), flavor, out=out, mask_cost=True
    )


@pytest.mark.gpu
class TestOnAGpu:
    def test_parity(self, local_engine: Engine, precise_bundle: Bundle) -> None:
        with open_runner(local_engine.card.flavor, precise_bundle, engine=local_engine.path) as runner:
            result = check_parity(precise_bundle, [runner])
        assert result.passed, result.failures()

    def test_rows_do_not_depend_on_their_neighbours(self, local_engine: Engine, precise_bundle: Bundle) -> None:
        inputs, _ = precise_bundle.golden()
        with EngineRunner(precise_bundle, local_engine) as runner:
            together = runner.run(inputs[:8])
            order = np.random.default_rng(0).permutation(8)
            np.testing.assert_array_equal(runner.run(inputs[order]), together[order])
            same = runner.run(np.repeat(inputs[:1], 8, axis=0))
            np.testing.assert_array_equal(same, np.repeat(same[:1], 8, axis=0))

    def test_a_batch_outside_every_profile(self, local_engine: Engine, precise_bundle: Bundle) -> None:
        inputs, _ = precise_bundle.golden()
        outside = pytest.raises(InputError, match="as in the engine's profiles")
        with EngineRunner(precise_bundle, local_engine) as runner, outside:
            runner.run(np.repeat(inputs[:1], 9, axis=0))

    def test_the_mask_was_timed(self, local_engine: Engine) -> None:
        cost = local_engine.card.mask_cost
        assert cost is not None
        assert cost.milliseconds is not None
        assert cost.twin_milliseconds is not None
        assert cost.milliseconds.keys() == cost.twin_milliseconds.keys() == {"1", "2", "4", "8"}

    def test_a_file_that_is_no_plan(self, local_engine: Engine, precise_bundle: Bundle, tmp_path: Path) -> None:
        (tmp_path / "model.plan").write_bytes(b"junk")
        broken = Engine(path=tmp_path, card=local_engine.card)
        with pytest.raises(EngineError, match="does not load the plan"):
            EngineRunner(precise_bundle, broken)
