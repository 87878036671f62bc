"""``gmmvit serve`` and ``gmmvit repository`` take the runner that was chosen on this machine, and state it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.installs import ServerInstall, find_server
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository_runner import options_for_server, resolved_options
from tests.choices import chosen_bundle
from tests.cli.terminal import gmmvit_here
from tests.serving.commands import Serve


@pytest.mark.nightly
@pytest.mark.integration
def test_the_choice_is_served_and_stated(precise_bundle: Bundle, tmp_path: Path) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16")
    with Serve(bundle.path) as service:
        where = service.ready()
        assert (where["bundle"], where["runner"]) == (bundle.sha256, "onnxruntime:fp16")
        with TritonRunner(bundle, where["grpc"]) as network, TritonClassifier(where["grpc"]) as classifier:
            assert (network.precision, network.settings["runner"]) == ("fp16", "onnxruntime:fp16")
            assert (classifier.runner, classifier.bundle) == ("onnxruntime:fp16", bundle.sha256)
        service.process.terminate()
        service.end()


def test_a_repository_states_the_choice_unless_a_runner_is_typed(precise_bundle: Bundle, tmp_path: Path) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16")
    for words, runner in (((), "onnxruntime:fp16"), (("--runner", "openvino:bf16"), "openvino:bf16")):
        answer = gmmvit_here("repository", bundle.path, "-o", tmp_path / "r", "--force", "--json", *words)
        assert json.loads(answer.out)["runner"] == runner
        configs = list((tmp_path / "r").glob("*/config.pbtxt"))
        assert configs
        assert all(f'string_value: "{runner}"' in config.read_text() for config in configs)


@pytest.mark.nightly
def test_every_command_that_takes_the_choice_says_that_it_was_judged_with_other_versions(
    precise_bundle: Bundle, tmp_path: Path
) -> None:
    """`serve` prints the notes of `options_for_server`, and `tune` those of `resolved_options`."""
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", versions={"onnxruntime": "1.0.0"})
    photo = tmp_path / "photos" / "photo.png"
    photo.parent.mkdir()
    Image.new("RGB", (32, 32)).save(photo)
    said = "onnxruntime:fp16 was judged with other versions: onnxruntime 1.0.0 → "
    quick = ("--batch", "1", "--samples", "1", "--rounds", "3", "--seconds", "0.01")
    commands: list[tuple[str | Path, ...]] = [
        ("repository", bundle.path, "-o", tmp_path / "r"),
        ("pack", bundle.path, "-o", tmp_path / "p"),
        ("classify", photo, "--bundle", bundle.path),
        ("classify", "--bundle", bundle.path, "--from", photo.parent, "--to", tmp_path / "to", "--workers", "1"),
        ("bench", bundle.path, "--synthetic", "--no-roofline", *quick),
    ]
    for words in commands:
        answer = gmmvit_here(*words)
        assert said in " ".join(answer.err.split()), words
    for _, notes in (
        options_for_server(bundle, RepositoryOptions(), find_server(), None),
        resolved_options(bundle, RepositoryOptions()),
    ):
        assert any(said in note for note in notes)


def test_a_server_runs_what_its_own_backend_can_run_there(precise_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
    install = ServerInstall(kind="system", binary=tmp_path / "tritonserver", backends=tmp_path / "backends")
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16")
    for served, server, typed, expected in (
        (bundle, install, None, ("onnxruntime", "onnxruntime:fp16")),
        (precise_bundle, install, None, ("onnxruntime", "onnxruntime")),
        (bundle, install, "openvino:bf16", ("python", "openvino:bf16")),
        (bundle, install, "onnxruntime-cuda:fp16", ("onnxruntime", "onnxruntime-cuda:fp16")),
        (bundle, find_server(), None, ("python", "onnxruntime:fp16")),
    ):
        options, _ = options_for_server(served, RepositoryOptions(), server, typed)
        assert (options.backend, str(options.runner)) == expected
