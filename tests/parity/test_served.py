"""Real servers with a single fault each, and a correct server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.runtimes.runners.open import open_runners
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import Repository, repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.parity.faults import with_manifest
from tests.parity.test_faults import failed_checks, labelled_by

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _preprocess(repository: Repository, name: str) -> Path:
    return repository.path / f"{name}_preprocess" / "1" / "gmmvit_inference" / "preprocess.py"


def nearest(repository: Repository, name: str) -> None:
    edited(_preprocess(repository, name), '"bilinear": "BILINEAR"', '"bilinear": "NEAREST"')


def crops(repository: Repository, name: str) -> None:
    edited(_preprocess(repository, name), "fit=fit,", 'fit="center",')


def bgr(repository: Repository, name: str) -> None:
    edited(
        _preprocess(repository, name),
        ".reshape(height, width, channels)",
        ".reshape(height, width, channels)[..., ::-1]",
    )


def other_mean(repository: Repository, name: str) -> None:
    config = repository.path / f"{name}_preprocess" / "config.pbtxt"
    edited(config, "[0.4914, 0.4822, 0.4465]", "[0.4377, 0.4438, 0.4728]")


def labels_permuted(repository: Repository, name: str) -> None:
    for model in (name, f"{name}_network"):
        file = repository.path / model / "labels.txt"
        lines = file.read_text().splitlines()
        file.write_text("\n".join([*lines[1:], lines[0]]) + "\n")


def mixes_up_rows(repository: Repository, name: str) -> None:
    model = repository.path / f"{name}_network" / "1" / "model.py"
    edited(model, "        start = 0\n", "        computed = [rows[::-1] for rows in computed]\n        start = 0\n")


FAULTS = {
    "nearest": (nearest, "preprocessing", "resized with nearest instead of bilinear"),
    "crops": (crops, "preprocessing", "fitted by center with crop_pct 1 instead of stretch"),
    "bgr": (bgr, "preprocessing", "channels in the order BGR"),
    "mean": (other_mean, "preprocessing", "expected mean [0.4914, 0.4822, 0.4465] as in the bundle, got [0.4377"),
    "labels": (labels_permuted, "served", "for class"),
    "rows": (mixes_up_rows, "served", "a request got the answer to another"),
}


@pytest.fixture(scope="module")
def broken_server(
    bundle: Bundle, tensor_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server with a broken model of each kind, and a correct model."""
    models = tmp_path_factory.mktemp("broken") / "models"
    models.mkdir()
    for name in (*FAULTS, "right"):
        source = tensor_bundle if name == "mean" else bundle
        written = repository_from_bundle(source, models.parent / name, RepositoryOptions(name=name, threads=1))
        if name in FAULTS:
            FAULTS[name][0](written, name)
        for model in written.path.iterdir():
            shutil.move(model, models)
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


def judged(bundle: Bundle, server: TritonServer, name: str) -> ParityReport:
    with open_runners(["triton-grpc"], bundle, urls=[server.grpc_url], model=name) as runners:
        return check_parity(bundle, runners, ParityOptions(data=labelled_by(bundle, 20)))


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_servers(fault: str, bundle: Bundle, tensor_bundle: Bundle, broken_server: TritonServer) -> None:
    _, check, reason = FAULTS[fault]
    report = judged(tensor_bundle if fault == "mean" else bundle, broken_server, fault)
    assert check in failed_checks(report)
    assert any(reason in why for why in report.runners[0].check(check).reasons), report.failures()
    if fault == "rows":
        assert "batch invariance" in failed_checks(report)
    else:
        assert not failed_checks(report) & {"numeric", "batch invariance"}  # the network itself is right


def test_a_right_server_passes_by_both_protocols(bundle: Bundle, broken_server: TritonServer) -> None:
    names = ["eager", "onnxruntime", "triton-grpc", "triton-http"]
    urls = [broken_server.grpc_url, broken_server.http_url]
    data = labelled_by(bundle)
    with open_runners(names, bundle, urls=urls, model="right") as runners:
        report = check_parity(bundle, runners, ParityOptions(data=data, gate=0.9, localize=True))
    assert report.passed, report.failures()
    shares = {runner.check("accuracy").details["top1"]["runner"] for runner in report.runners}
    assert len(shares) == 1
    for runner in report.runners[2:]:
        served = runner.check("served").details
        assert served["joined"] > 0  # requests really were mixed
        assert served["largest"] <= served["limit"]
        assert runner.provenance["server"].startswith("Triton 2.")
        assert "cannot be inspected" in runner.check("localize").summary


def test_an_older_bundle_on_the_server(
    bundle: Bundle, broken_server: TritonServer, tmp_path: Path, gmmvit: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    shutil.copytree(bundle.path, tmp_path / "newer")
    newer = with_manifest(tmp_path / "newer", lambda data: data["versions"].update(torch="99.0"))
    with pytest.raises(BundleError, match=r"serves right_network from bundle .*, not from"):
        TritonRunner(newer, broken_server.http_url, model="right")
    options = ("--runner", "triton-http", "--url", broken_server.http_url, "--served-name", "right")
    answer = gmmvit("parity", newer.path, *options)
    assert answer.returncode == 1
    assert "failed: triton-http: served: bundle: http://" in answer.stdout
    assert "serves right_network from bundle" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "FAILED: served"  # the weights are the same: nothing else is wrong


def test_a_bundle_that_cannot_even_be_called(
    broken_server: TritonServer,
    tensor_bundles: dict[str, Bundle],
    gmmvit: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    options = ("--runner", "triton-http", "--url", broken_server.http_url, "--served-name", "right")
    answer = gmmvit("parity", tensor_bundles["vit_gmm"].path, *options)
    assert answer.returncode == 1
    assert "Error: http://" in answer.stderr
    assert "hint: write the repository again" in answer.stderr
