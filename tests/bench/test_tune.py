"""Settings are searched on real servers; the best setting is written, with its measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gmmvit_deploy.bench import served_load
from gmmvit_deploy.bench import tune as tuning
from gmmvit_deploy.bench.tune import TUNING_FILE, TuneOptions, tune
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError, OutputError
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.served_models import Tuned, read_tuning
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

PORTS = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try fewer delays and search for a shorter time; each trial still has as many queries as a p99 needs."""
    monkeypatch.setattr(tuning, "_DELAYS_US", (0,))
    monkeypatch.setattr(served_load, "_STEPS", 2)
    monkeypatch.setattr(served_load, "_MIN_SECONDS", 0.0)


@pytest.mark.nightly
def test_the_best_of_what_was_tried_is_written(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "tuned"
    ours = our_kernels("fp32")[0] is not None
    names = ["onnxruntime", "openvino+kernels" if ours else "openvino"]
    options = TuneOptions(bound_ms=2000, runners=tuple(map(RunnerName.parse, names)))
    tuned = tune(bundle, out, options)
    assert tuned.best.rate == max(trial.rate for trial in tuned.trials) > 0
    settings = [trial.settings for trial in tuned.trials]
    tried = [(str(each.runner), each.instances) for each in settings]
    assert tried[:2] == [(name, 1) for name in names]
    assert len(tried) == len(set(tried)) >= 2
    assert all(trial.load.outputs.right for trial in tuned.trials)
    notes = json.loads((out / TUNING_FILE).read_text())
    assert notes["rate"] == tuned.best.rate
    assert notes["peak_bytes"] == tuned.best.peak_bytes > 2**26  # Triton, ONNX Runtime and Python take more than 64 MiB
    assert read_tuning(out) == Tuned(rate=tuned.best.rate, bound_ms=2000)  # what bounds the queue of a gateway
    assert notes["best"]["runner"] == str(tuned.best.settings.runner)
    config = (out / "gmmvit_network" / "config.pbtxt").read_text()
    assert f'string_value: "{tuned.best.settings.runner}"' in config
    with TritonServer(out, options=PORTS) as server, TritonRunner(bundle, server.grpc_url) as runner:
        report = check_parity(bundle, [runner])
    assert report.passed, report.failures()


@pytest.mark.nightly
def test_int8_with_our_kernels_behind_triton_gives_the_models_answers(precise_bundle: Bundle, tmp_path: Path) -> None:
    kernels = our_kernels("int8")[0] is not None
    options = RepositoryOptions(runner=RunnerName("openvino", "int8", kernels=kernels, form="static"), instances=2)
    repository = repository_from_bundle(precise_bundle, tmp_path / "models", options)
    with (
        TritonServer(repository.path, options=PORTS) as server,
        TritonRunner(precise_bundle, server.grpc_url) as runner,
    ):
        assert (runner.precision, runner.settings["runner"]) == ("int8", str(options.runner))
        report = check_parity(precise_bundle, [runner])
    assert int8_saturates() or not report.failed, report.failures()  # undecided: no images judge int8


@pytest.mark.nightly
def test_a_bound_that_nothing_holds_writes_nothing(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "cores", lambda: 1)
    with pytest.raises(InputError, match=r"no setting keeps p99 below 0\.001 ms: the lowest p99 was"):
        tune(bundle, tmp_path / "tuned", TuneOptions(bound_ms=0.001))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_what_is_there_is_kept(bundle: Bundle, tmp_path: Path, gmmvit: Callable[..., CompletedProcess[str]]) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(OutputError):
        tune(bundle, tmp_path, TuneOptions(bound_ms=10))
    for arguments, message in (
        (("--bound-ms", "0"), "more than 0"),
        (("--bound-ms", "10", "--runner", "openvino,openvino"), "distinct runners"),
    ):
        answer = gmmvit("tune", bundle.path, "-o", tmp_path / "new", *arguments)
        assert answer.returncode == 1
        assert message in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
