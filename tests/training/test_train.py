"""``gmmvit train``: networks that classify digits, files that export without options, and runs that were killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.cli.terminal import gmmvit_here
from tests.conftest import FREE_PORTS
from tests.documented import PAGES, blocks, commands
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

SMALL = ["--data", "digits", "--mask", "gmm", "--image-size", "8"]
QUICK = [*SMALL, "--recipe", "light", "--padding", "0", "--batch", "16", "--rate", "1e-3", "--epochs", "1"]
NORMALISED = ["--mean", "0.5,0.5", "--std", "0.5,0.5"]
PAGE = PAGES / "train.md"
_HANGS_S = 600  # no run takes as long, also while other programs use all cores


def trained(*words: str | Path) -> dict[str, Any]:
    answer = gmmvit_here("train", *words, "--json")
    assert answer.status == 0, answer.err
    result: dict[str, Any] = json.loads(answer.out)
    return result


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def logged_lines(folder: Path) -> int:
    log = folder / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def started(*words: str | Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a run in a process of its own, with as many threads as this process has, so that sums are equal."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **variables}
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.first(1)
@pytest.mark.parametrize("network", ["preset", "model"])
def test_trained_digits_are_exported_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    """The commands of the page; export and server get no value but the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (training, export), *_ = (
        [shlex.split(command.text)[1:] for command in commands(block)]
        for block in blocks(PAGE, PAGE.read_text(encoding="utf-8"))
        if block.test and f"--{network} " in block.text
    )
    result = trained(*training[1:])
    assert result["accuracy"] > 0.5  # a guess is right in a tenth of the images
    answer = gmmvit_here(*export)
    assert answer.status == 0, answer.err
    bundle = open_bundle(tmp_path / "bundle")
    assert len(bundle.manifest.masks) == 6
    assert bundle.manifest.labels == tuple("0123456789")
    held_out = open_data("digits")
    files = [tmp_path / f"{index}.png" for index in range(len(held_out))]
    for index, file in enumerate(files):
        file.write_bytes(held_out.encoded(index))
    repository = repository_from_bundle(bundle, tmp_path / "models")
    with (
        TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as server,
        TritonClassifier(server.grpc_url, model=DEFAULT_MODEL) as client,
    ):
        answers = classify_files(client, files, top=1)
    right = [answer.predictions[0].label == str(held_out.label(index)) for index, answer in enumerate(answers)]
    assert np.mean(right) == pytest.approx(result["accuracy"])


@pytest.mark.nightly
def test_a_run_that_was_killed_writes_the_log_of_a_quiet_run(tmp_path: Path) -> None:
    """The recipe has every random number: order, crops, policies, erasing, mixing, stochastic depth.  The killed run
    has worker processes, the quiet run has none.
    """
    words = [*SMALL, "--preset", "vit_d6", "--epochs", "2", "--batch", "256", "--ema", "0.9", "--save-steps", "5"]
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    trained("-o", quiet, *words)
    assert len(records(quiet)) == 2 * 16 + 2  # three passes over 1437 images are 16 batches and a rest
    run = started("-m", "gmmvit_cli.main", "train", "-o", killed, *words, "--workers", "1")
    try:
        wait_until(
            lambda: logged_lines(killed) >= 22 or run.poll() is not None, "22 lines of the log", within_s=_HANGS_S
        )
    finally:
        os.killpg(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert 22 <= logged_lines(killed) < 34
    trained("-o", killed, *words, "--resume")
    assert (killed / "log.jsonl").read_bytes() == (quiet / "log.jsonl").read_bytes()
    first, second = (torch.load(folder / "checkpoint.pth", weights_only=True) for folder in (quiet, killed))
    for weights in ("model_state_dict", "state_dict_ema"):
        assert all(torch.equal(first[weights][name], second[weights][name]) for name in first[weights])
    events = EventAccumulator(str(killed / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/step")] == [*range(1, 33)]
    assert [event.value for event in events.Scalars("accuracy/epoch")] == pytest.approx(
        [record["accuracy"] for record in records(quiet) if "accuracy" in record]
    )
    averaged, last = (load_checkpoint(killed / "checkpoint.pth", LoadHints(weights=kind)) for kind in (None, "trained"))
    assert averaged.file.weights == "averaged"
    name = "blocks.0.attention.qkv.weight"
    assert torch.equal(averaged.model.state_dict()[name], second["state_dict_ema"][name])
    assert torch.equal(last.model.state_dict()[name], second["model_state_dict"][name])


@pytest.mark.nightly
def test_two_processes_compute_the_steps_of_a_single_process(tmp_path: Path) -> None:
    """The images and the augmentations of a step are the same; sums differ in rounding."""
    words = [*QUICK, "--preset", "vit_d6", "--batch", "128", "--device", "cpu"]
    trained("-o", tmp_path / "single", *words)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gmmvit_cli.main"]
    run = started(*torchrun, "train", "-o", tmp_path / "two", *words, OMP_NUM_THREADS="1")
    try:
        assert run.wait(timeout=_HANGS_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    single, two = records(tmp_path / "single"), records(tmp_path / "two")
    assert len(single) == len(two) == 12
    np.testing.assert_allclose(
        [record["loss"] for record in two[:5]], [record["loss"] for record in single[:5]], rtol=1e-3
    )
    assert [record["rate"] for record in two] == [record["rate"] for record in single]
    assert two[-1]["accuracy"] == pytest.approx(single[-1]["accuracy"], abs=0.05)


@pytest.fixture(scope="module")
def run_of_a_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "trained"
    trained("-o", folder, *QUICK, "--preset", "vit_d6", "--batch", "1436")
    return folder


def test_progress_and_log_state_what_a_step_and_an_epoch_gave(tmp_path: Path) -> None:
    """A folder with the splits train and test; --verbose prints the progress of the first step of each epoch."""
    png = open_data("digits").encoded(0)
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "digits" / name).mkdir(parents=True)
        for index in range(3 if "train" in name else 1):
            (tmp_path / "digits" / name / f"{index}.png").write_bytes(png)
    words = ["--data", f"folder:{tmp_path / 'digits'}", "--preset", "vit_d6", "--image-size", "8", "--batch", "2"]
    answer = gmmvit_here("train", "-o", tmp_path / "trained", *words, "--recipe", "light", "--epochs", "2", "--verbose")
    assert answer.status == 0, answer.err
    assert "accuracy 50.00% of 2 test images" in " ".join(answer.out.split())
    printed = re.findall(r"train: epoch (\d of 2, .*)", answer.err)  # on a slow machine also of later steps
    first, second = (next(line for line in printed if line.startswith(epoch)) for epoch in ("1", "2"))
    assert re.fullmatch(r"1 of 2, loss \d\.\d+ \(1 of 6 done, about \d+ (s|min) left\)", first)
    assert re.fullmatch(r"2 of 2, loss \d\.\d+, accuracy 50\.00% \(4 of 6 done, about \d+ (s|min) left\)", second)
    step, epoch = {"step", "epoch", "loss", "rate"}, {"step", "epoch", "loss", "rate", "accuracy"}
    written = records(tmp_path / "trained")
    assert [record.keys() for record in written] == [step, step, step, epoch] * 2
    assert [record["step"] for record in written] == [1, 2, 3, 3, 4, 5, 6, 6]
    for at in (0, 4):
        assert written[at + 3]["loss"] == pytest.approx(np.mean([record["loss"] for record in written[at : at + 3]]))
        assert written[at + 3]["accuracy"] == 0.5
    answer = gmmvit_here("train", "-o", tmp_path / "trained", *words)
    assert "add --resume to continue a run, or add --force to replace the folder" in " ".join(answer.err.split())


@pytest.mark.nightly
def test_a_resumed_run_has_the_settings_of_the_run_before(run_of_a_step: Path, tmp_path: Path) -> None:
    words = ["-o", run_of_a_step, *QUICK, "--preset", "vit_d6", "--batch", "1436", "--resume"]
    log = (run_of_a_step / "log.jsonl").read_bytes()
    assert trained(*words)["steps"] == 1  # the run is complete
    assert (run_of_a_step / "log.jsonl").read_bytes() == log
    answer = gmmvit_here("train", *words, "--seed", "3", "--rate", "0.5")
    assert answer.status == 1
    assert "other settings: rate: 0.001, now 0.5; seed: 0, now 3" in answer.err
    answer = gmmvit_here("train", "-o", tmp_path / "none", *words[2:])
    assert (answer.status, list(tmp_path.iterdir())) == (1, [])
    assert "there is no run to resume" in answer.err
    other = tmp_path / "other"
    other.mkdir()
    torch.save({"state_dict": {"a": torch.zeros(2)}}, other / "checkpoint.pth")
    answer = gmmvit_here("train", "-o", other, *words[2:])
    assert answer.status == 1
    assert "expected a checkpoint that gmmvit train wrote" in answer.err


@pytest.mark.nightly
def test_a_checkpoint_whose_entries_contradict_each_other_is_refused(run_of_a_step: Path, tmp_path: Path) -> None:
    content = torch.load(run_of_a_step / "checkpoint.pth", weights_only=True)
    images = json.loads(content["gmmvit_images"])
    for entry, value, message in (
        ("gmmvit_model", "[", "expected the model spec in the metadata to be JSON"),
        ("gmmvit_images", "3", "expected the preprocessing in the metadata to be a JSON object"),
        ("gmmvit_images", json.dumps({"labels": []}), "the preprocessing that the file states is not valid"),
        ("gmmvit_images", json.dumps(images | {"labels": ["a"]}), "states 1 labels and 3 channels"),
    ):
        torch.save(content | {entry: value}, tmp_path / "changed.pth")
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path / "changed.pth")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "digits"], "expected --preset or --model, got neither"),
        (["--data", "digits", "--preset", "vit", "--model", "test_vit"], "expected --preset or --model, got both"),
        (["--data", "digits", "--preset", "vit", "--model-args", '{"depth": 1}'], "--model-args are arguments of timm"),
        (["--data", "digits", "--preset", "vit", "--image-size", "10"], "expected a divisor of the image size 10"),
        (["--data", "digits", "--model", "net.py:Net"], "expected the name of an architecture of timm"),
        (["--data", "digits", "--model", "test_resnet", "--mask", "gmm"], "no attention"),
        (["--data", "digits", "--preset", "vit", "--batch", "2001", "--repeat", "none"], "expected a multiple of 2"),
        (["--data", "digits", "--preset", "vit", "--batch", "2000", "--repeat", "none"], "at most the 1437 images"),
        (["--data", "digits", "--preset", "vit", "--channels", "2", *NORMALISED], "AutoAugment changes grey and RGB"),
        (["--data", "digits", "--preset", "vit", "--resume", "--force"], "--resume continues the run in the folder"),
        (["--data", "array:images.npz", "--preset", "vit"], "expected the class of each image"),
        (["--data", "array:several.npz", "--preset", "vit"], "expected a single class for each image"),
        (["--data", "folder:other", "--preset", "vit"], "they differ in b, c"),
        (["--data", "folder:one", "--preset", "vit"], "expected at least two classes, got a"),
        (["--data", "folder:two", "--preset", "vit"], "the images can have any size"),
        (["--data", "folder:two", "--preset", "vit", "--image-size", "8", "--batch", "2"], "b.png: "),
    ],
)
def test_mistakes_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    png = open_data("digits").encoded(0)
    for name in ("other/train/a", "other/train/b", "other/test/a", "other/test/c", "one/a", "two/a", "two/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / f"{name[-1]}.png").write_bytes(png)
    np.savez("images.npz", images=np.zeros((4, 8, 8), np.uint8))
    np.savez("several.npz", images=np.zeros((4, 8, 8), np.uint8), labels=np.eye(4, dtype=np.uint8))
    before = {*tmp_path.rglob("*")}
    if "2" in words:
        (tmp_path / "two" / "b" / "b.png").write_bytes(b"no image")
    answer = gmmvit_here("train", "-o", "trained", *words)
    assert (answer.status, message in " ".join(answer.err.split())) == (1, True), answer.err
    assert "hint: " in answer.err
    assert {*tmp_path.rglob("*")} == before
