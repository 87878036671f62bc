"""Mistakes that a user can type: two lines, an exit status, and no files left.  A command for each rule.

All options are declared by `gmmvit_cli.panels`, so a rule that holds for an option holds for all of its kind.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import new_folder
from tests.cli.terminal import gmmvit_here, refused
from tests.conftest import GOLDEN


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("exprot", "there is no command 'exprot'; did you mean export?", "type gmmvit --help to list the commands"),
        ("--no-such-option", "--no-such-option", "type gmmvit --help to list the commands"),
        ("doctor --no-such-option", "gmmvit doctor: ", "type gmmvit doctor --help"),
        ("parity", "gmmvit parity: Missing argument", "for example: gmmvit parity bundle; all options: "),
        ("convert nowhere", "gmmvit convert: Missing option", "for example: gmmvit convert "),
        ("pack a b", "gmmvit pack: ", "type gmmvit pack --help"),
        ("bench --rounds many", "--rounds: expected a valid integer, got 'many'", "type gmmvit bench --help"),
        ("classify --top 3 --top 0", "--top: expected a number ", "type gmmvit classify --help"),
    ],
)
def test_what_the_command_line_cannot_read(command: str, message: str, hint: str, tmp_path: Path) -> None:
    assert refused(gmmvit_here(*command.split()), message, status=2)[1].startswith(hint)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench nowhere --synthetic --seconds nan", "--seconds: expected a number, got nan"),
        ("export https://example.org/model.pth -o new", "gmmvit downloads nothing"),
        ("export nowhere -o new --set heads", "--set heads: expected NAME=VALUE"),
        ("export nowhere -o new --model-args {", "--model-args: expected JSON, got '{'"),
        ("pack nowhere --runner eager", "--runner eager: this command cannot use this runner"),
        ("tune nowhere --bound-ms 1 --runner none", "runner 'none' is not known"),
        ("optimize nowhere --data none:x", "data 'none:x': expected a kind of data"),
        ("bench nowhere --data folder:vall", "vall: no such file or folder"),
        ("bench nowhere --data mnist:vall", "vall: no such file or folder"),
        ("bench nowhere --data vall", "an .npz or an .npy; vall does not exist"),
        ("manifests nowhere --replicas 2", "--replicas: expected MIN:MAX, such as 2:10, got '2'"),
        ("gateway . --keys no-such-file", "--keys no-such-file: no such file or folder"),
        ("bench --compare no-such-file other", "no-such-file"),
        ("demo --quiet --verbose", "--quiet and --verbose exclude each other"),
    ],
)
def test_a_value_that_cannot_be(command: str, message: str, tmp_path: Path) -> None:
    refused(gmmvit_here(*command.split()), message)
    assert list(tmp_path.iterdir()) == []


OWN_CLASS = "export w.pth -o new --model n.py:Net"


@pytest.mark.parametrize(
    ("command", "messages"),
    [
        (
            "export x -o w.pth --precision fp64 --resize none --max-batch 0",
            ["w.pth exists", "'fp64' is not", "--resize: expected", "x: expected a PyTorch", "- --max-batch: expected"],
        ),
        (
            "parity nowhere --data folder:no --report w.html --expect-accuracy 93 --gate 2 --runner none --engine no",
            [
                "w.html",
                "no: no such",
                "nowhere",
                "- --expect-accuracy: expected a share",
                "- --gate: ",
                "'none'",
                "--engine no",
            ],
        ),
        (
            "convert nowhere --precision fp64 --calibration no --snr-db -1 --accuracy 2",
            ["'fp64' is not", "pattern", "- --snr-db: expected", "- --accuracy: expected a share below 1", "nowhere"],
        ),
        (
            "serve nowhere --classify-port 8 --host 0.0.0.0 --keys no --gateway --runner none",
            ["--keys no", "'none'", "--host and", "--classify-port and", "nowhere"],
        ),
        (
            "classify a --from b --to c --shards 2/1 --bundle nowhere --features f.npz",
            ["IMAGE does not", "--features does not", "--shards 2/1", "nowhere: "],
        ),
        (
            f"{OWN_CLASS} --set heads=2 --resize-to 64",
            ["n.py: no such", "--resize-to does", "--set heads does", "size", "mean"],
        ),
        (
            "optimize nowhere --data folder:no --calibration no --report w.pth --gate 2 --batch 0 --for all",
            ["w.html", "no: no such", "pattern", "nowhere", "- --gate: ", "- --batch: ", "--for: expected"],
        ),
    ],
)
def test_all_mistakes_are_named_at_once(command: str, messages: list[str], tmp_path: Path) -> None:
    (tmp_path / "w.pth").touch()
    (tmp_path / "w.html").touch()
    error, hint = refused(gmmvit_here(*command.split()), f"{len(messages)} errors:\n- ", *messages)
    assert error.count("\n- ") == len(messages)
    assert hint == "correct all of them"


@pytest.mark.parametrize(
    "command",
    ["inspect", "parity", "serve", "build", "classify --bundle"],
    ids=["checkpoint", "bundle", "bundle or repository", "bundle or graph", "option"],
)
class TestInputs:
    def test_missing(self, command: str, tmp_path: Path) -> None:
        refused(gmmvit_here(*command.split(), "nowhere"), "nowhere")
        assert list(tmp_path.iterdir()) == []

    def test_an_empty_folder(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "image.png").touch()
        images = ["image.png"] if command.startswith("classify") else []
        refused(gmmvit_here(*command.split(), "folder", *images), "folder")
        assert [path.name for path in (tmp_path / "folder").rglob("*")] == []

    @pytest.mark.parametrize(
        "mode", [0o644, pytest.param(0, marks=pytest.mark.skipif(os.geteuid() == 0, reason="root"))]
    )
    def test_a_file_of_something_else(self, command: str, mode: int, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"\0something else")
        (tmp_path / "file").chmod(mode)
        (tmp_path / "image.png").touch()
        images = ["image.png"] if command.startswith("classify") else []
        refused(gmmvit_here(*command.split(), "file", *images), "file")


@pytest.mark.parametrize("command", ["serve", "parity", "gateway --keys w.pth", "convert --precision fp16"])
def test_a_checkpoint_in_place_of_a_bundle(command: str, tmp_path: Path) -> None:
    (tmp_path / "w.pth").touch()
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text("{}")
    for name in ("w.pth", "hub"):
        _, hint = refused(gmmvit_here(*command.split(), name), f"{name}: expected a bundle, got a checkpoint")
        assert hint == f"type gmmvit export {name} -o BUNDLE, then give BUNDLE"


@pytest.mark.parametrize(
    "name", ["google/vit-base", "hf-hub:google/vit-base", "https://huggingface.co/google/vit-base"]
)
def test_a_name_of_the_hub_in_place_of_a_folder(name: str) -> None:
    _, hint = refused(gmmvit_here("export", name, "-o", "new"), "gmmvit downloads nothing")
    assert hint == "type hf download google/vit-base --local-dir vit-base, then gmmvit export vit-base -o BUNDLE"


def test_a_name_of_timm_in_place_of_a_file() -> None:
    _, hint = refused(gmmvit_here("export", "test_vit", "-o", "new"), "this path does not exist")
    assert hint.endswith("for an architecture of timm, type gmmvit export WEIGHTS.pth --model test_vit -o BUNDLE")


@pytest.mark.parametrize(
    "command",
    ["pack nowhere --output", "bench nowhere --synthetic --output", "parity nowhere --report"],
    ids=["folder", "file", "page"],
)
def test_an_output_that_exists_is_kept(command: str, tmp_path: Path) -> None:
    (tmp_path / "taken.html").write_text("precious")
    refused(gmmvit_here(*command.split(), "taken.html"), "taken.html exists")
    assert [(path.name, path.read_text()) for path in tmp_path.rglob("*")] == [("taken.html", "precious")]


def test_the_hint_of_a_wrong_value_names_no_other_option(tmp_path: Path) -> None:
    (tmp_path / "w.pth").touch()
    _, hint = refused(gmmvit_here("export", "w.pth", "-o", "new", "--set", "heads=0"), "--set heads")
    assert hint == "type gmmvit export --help to read what each option means"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "int8,fp8"), "fp8 needs calibration images"),
        (("--precision", "fp16", "--calibration", "photos"), "fp16 needs no calibration"),
        (("--precision", "int8", "--calibration", "photos"), "photos: no such file or folder"),
        (("--precision", "int8", "--calibration", "cifar10"), "expected a path after cifar10:"),
        (("--precision", "int8", "--calibration", "digits#some"), "split 'some' is not known"),
        (("--precision", "fp16", "--snr-db", "25"), "--snr-db is for int8 with calibration images"),
    ],
    ids=str,
)
def test_a_calibration_or_gate_that_cannot_work_is_refused_before_anything_is_read(
    arguments: tuple[str, ...], message: str
) -> None:
    refused(gmmvit_here("convert", "nowhere", *arguments), message)  # not that the input does not exist


@pytest.mark.parametrize("kind", ["pixels", "tensor"])
def test_calibration_images_of_the_wrong_size_are_refused_before_the_export(kind: str, tmp_path: Path) -> None:
    """The test exports nothing: `tests/conftest.py` fails a test without the marker that reaches torch.onnx.export."""
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 28, 28, 3), np.uint8))
    words = ("-o", "new", "--dataset", "cifar10", "--precision", "int8", "--calibration", "x.npz", "--input", kind)
    answer = gmmvit_here("export", GOLDEN / "vit_gmm.pth", *words)
    also = "float32 (N, 3, 32, 32) or " if kind == "tensor" else ""
    refused(answer, f"x.npz: expected {also}uint8 (N, 32, 32, 3), got uint8 (2, 28, 28, 3)")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_no_message_names_the_folder_that_work_is_done_in(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, new_folder(tmp_path / "out") as folder:
        raise InputError(f"{folder / 'model.onnx'}: broken", hint=f"remove {folder}")
    assert str(caught.value) == f"{tmp_path / 'out' / 'model.onnx'}: broken"
    assert caught.value.hint == f"remove {tmp_path / 'out'}"
