"""Every mistake that a user can type, at every command: two lines, an exit status, and no files left.

Commands, arguments and options are those of the app, so a new command or option is tried as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gmmvit_cli.commands import SUMMARIES
from gmmvit_cli.main import _expected
from gmmvit_cli.panels import OUTPUT
from gmmvit_deploy.errors import InputError, OutputError
from gmmvit_deploy.export.variants import variant_from_bundle
from gmmvit_deploy.files.writing import new_folder
from tests.cli.terminal import Answer, gmmvit_here, refused
from tests.cli.test_help import COMMANDS, GROUP
from tests.conftest import GOLDEN

REQUIRED = {"precision": "fp16", "bound_ms": "1", "out": "new", "to": "nowhere", "data": "digits"}
"""Values of the options that a command requires; arguments that it requires are paths."""


def arguments_of(name: str, path: str | Path = "nowhere") -> list[str]:
    """Return the required arguments and options, with ``path`` for the inputs."""
    words: list[str] = []
    for param in COMMANDS[name].params:
        if not param.required:
            continue
        if param.param_type_name == "argument":
            words.append(str(path))
        else:
            words += [param.opts[-1], REQUIRED[param.name]]
    return words


def input_of(name: str) -> Any:
    """Return the first argument of a command, or None."""
    return next((param for param in COMMANDS[name].params if param.param_type_name == "argument"), None)


OPTIONS: list[tuple[str, Any, str]] = [
    (name, param, str(param.type_descriptor.annotation))
    for name in SUMMARIES
    for param in COMMANDS[name].params
    if param.param_type_name == "option"
]
"""(command, option, its type in words)."""
NUMBERS = [(name, option.opts[-1]) for name, option, kind in OPTIONS if "int" in kind or "float" in kind]
FLOATS = [(name, option.opts[-1]) for name, option, kind in OPTIONS if "float" in kind]
NAMES = [(name, option.opts[-1]) for name, option, _ in OPTIONS if option._custom_shell_complete is not None]
INPUT_PATHS = [
    (name, option.opts[-1])
    for name, option, kind in OPTIONS
    if "Path" in kind
    and option.rich_help_panel != OUTPUT.title
    # Folders that are written where they do not exist; --to is the same folder as --state (tests/serving/rollout).
    and option.opts[-1] not in ("--timing-cache", "--state", "--to")
]
OUTPUTS = [
    (name, option.opts[-1])
    for name, option, kind in OPTIONS
    if "Path" in kind
    and option.rich_help_panel == OUTPUT.title
    and option.opts[-1] not in ("--log", "--access-log")  # a log is continued in place
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in its own folder, and leaves the folder unchanged."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", SUMMARIES)
def test_unknown_option(name: str, tmp_path: Path) -> None:
    answer = gmmvit_here(name, "--no-such-option")
    refused(answer, "--no-such-option", status=2)
    assert f"gmmvit {name}" in answer.err.splitlines()[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("typed", [("--model", "net"), ("--model=net",)], ids=" ".join)
@pytest.mark.parametrize("name", ["parity", "bench", "classify"])
def test_the_old_name_of_the_served_name(name: str, typed: tuple[str, ...]) -> None:
    answer = gmmvit_here(name, *arguments_of(name), *typed)
    if name == "classify":
        refused(answer, "gmmvit classify: the option --model is now --served-name", status=2)
    else:
        refused(answer, "--model: expected FILE.py:CLASS, got 'net'")
    assert "type --served-name net" in answer.err.splitlines()[1]


@pytest.mark.parametrize("name", [name for name in SUMMARIES if arguments_of(name)])
def test_missing_argument(name: str, tmp_path: Path) -> None:
    answer = gmmvit_here(name)
    refused(answer, "Missing", status=2)
    assert f"for example: gmmvit {name} " in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SUMMARIES)
def test_an_argument_too_many(name: str) -> None:
    if input_of(name) is None or input_of(name).nargs == 1:
        refused(gmmvit_here(name, *arguments_of(name), "a", "b"), status=2)


@pytest.mark.parametrize(("name", "option"), FLOATS)
def test_nan_is_no_number(name: str, option: str) -> None:
    """No comparison with NaN is true, so that every gate would hold."""
    answer = gmmvit_here(name, *arguments_of(name), option, "nan")
    assert answer.status
    assert f"{option}: expected a number" in answer.err
    assert "nan" in answer.err


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_word_in_place_of_a_number(name: str, option: str, tmp_path: Path) -> None:
    answer = gmmvit_here(name, *arguments_of(name), option, "many")
    _, hint = refused(answer, f"{option}: expected a valid ", "got 'many'", status=2)
    assert hint == f"type gmmvit {name} --help to read what each option means"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "option"), NAMES)
def test_a_name_that_is_not_among_the_choices(name: str, option: str, tmp_path: Path) -> None:
    extra = ["nowhere"] if name == "bench" else []
    if option == "--calibration" and name != "optimize":  # which tries every precision
        extra += ["--precision", "int8"]
    refused(gmmvit_here(name, *arguments_of(name), *extra, option, "no-such-name"), "no-such-name")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in SUMMARIES if input_of(name) is not None])
class TestInputs:
    def input(self, name: str, path: Path) -> Answer:
        words = arguments_of(name, path) if input_of(name).required else [*arguments_of(name), str(path)]
        words += {"bench": ["--synthetic"], "export": ["--dataset", "cifar10"]}.get(name, [])
        return gmmvit_here(name, *words)

    def test_missing(self, name: str, tmp_path: Path) -> None:
        refused(self.input(name, tmp_path / "nowhere"), "nowhere")
        assert list(tmp_path.iterdir()) == []

    def test_an_empty_folder(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        refused(self.input(name, tmp_path / "folder"), "folder")
        assert [path.name for path in tmp_path.rglob("*")] == ["folder"]

    def test_a_file_of_something_else(self, name: str, tmp_path: Path) -> None:
        if name == "classify":
            pytest.skip("classify answers for each file by itself; its own test tries broken files")
        (tmp_path / "file").write_bytes(b"\0something else")
        refused(self.input(name, tmp_path / "file"), "file")
        assert [path.name for path in tmp_path.rglob("*")] == ["file"]

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
    def test_a_file_that_may_not_be_read(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"secret")
        (tmp_path / "file").chmod(0)
        refused(self.input(name, tmp_path / "file"), "file")


@pytest.mark.parametrize(("name", "option"), INPUT_PATHS)
def test_an_option_that_names_no_file(name: str, option: str, tmp_path: Path) -> None:
    values = ("no-such-file", "no-such-file") if option == "--compare" else ("no-such-file",)
    refused(gmmvit_here(name, *arguments_of(name), option, *values), "no-such-file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "option"), OUTPUTS)
def test_an_output_that_exists_is_kept(name: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "taken.html").write_text("precious")
    words = [word for word in arguments_of(name) if (option, word) != ("--output", "new")]
    if option == "--output" and "--output" in words:
        words.remove("--output")
    extra = ["--synthetic", "nowhere"] if name == "bench" else []
    refused(gmmvit_here(name, *words, *extra, option, "taken.html"), "taken.html exists")
    assert [(path.name, path.read_text()) for path in tmp_path.rglob("*")] == [("taken.html", "precious")]


@pytest.mark.parametrize("name", SUMMARIES)
def test_quiet_and_verbose_exclude_each_other(name: str) -> None:
    refused(gmmvit_here(name, *arguments_of(name), "--quiet", "--verbose"), "--quiet and --verbose")


def test_unknown_command() -> None:
    answer = gmmvit_here("exprot")
    refused(answer, "no command 'exprot'", "export", status=2)
    assert "gmmvit --help" in answer.err
    refused(gmmvit_here("--no-such-option"), "--no-such-option", status=2)


def test_the_lists_are_not_empty() -> None:
    assert len(NUMBERS) > 20
    assert len(NAMES) > 20
    assert len(OUTPUTS) >= 8
    assert {option for _, option in INPUT_PATHS} >= {"--engine", "--tritonserver", "--compare"}
    assert GROUP.list_commands(None) == list(SUMMARIES)


@pytest.mark.parametrize("setting", ["channels=9", "heads=0"])
def test_the_hint_of_a_wrong_value_names_no_other_option(setting: str) -> None:
    _, hint = refused(
        gmmvit_here("export", *arguments_of("export"), "--set", setting), f"--set {setting.split('=')[0]}"
    )
    assert hint == "type gmmvit export --help to read what each option means"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "int8,fp8"), "fp8 needs calibration images"),
        (("--precision", "fp16", "--calibration", "photos"), "fp16 needs no calibration"),
        (("--precision", "int8", "--calibration", "photos"), "photos: no such file or folder"),
        (("--precision", "int8", "--calibration", "x.npz"), "x.npz: no such file"),
        (("--precision", "int8", "--calibration", "cifar10:x"), "x: no such file or folder"),
        (("--precision", "int8", "--calibration", "cifar10"), "expected a path after cifar10:"),
        (("--precision", "int8", "--calibration", "digits#some"), "split 'some' is not known"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["export", "convert"])
def test_a_calibration_that_cannot_work_is_refused_before_anything_is_read(
    name: str, arguments: tuple[str, ...], message: str
) -> None:
    words = [word for word in arguments_of(name) if word not in ("--precision", "fp16")]
    refused(gmmvit_here(name, *words, *arguments), message)  # not that the input does not exist


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "fp16", "--snr-db", "25"), "--snr-db is for int8 with calibration images"),
        (("--precision", "int8", "--calibration", "digits", "--keep-decisions", "1"), "expected a share below 1"),
        (("--precision", "int8", "--calibration", "digits", "--accuracy", "99"), "expected a share below 1"),
    ],
    ids=str,
)
def test_a_gate_that_cannot_work_is_refused_before_anything_is_read(arguments: tuple[str, ...], message: str) -> None:
    refused(gmmvit_here("convert", "nowhere", *arguments), message)


@pytest.mark.parametrize("kind", ["pixels", "tensor"])
def test_calibration_images_of_the_wrong_size_are_refused_before_the_export(kind: str, tmp_path: Path) -> None:
    """The test exports nothing: `tests/conftest.py` fails a test without the marker that reaches torch.onnx.export."""
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 28, 28, 3), np.uint8))
    words = ("-o", "new", "--dataset", "cifar10", "--precision", "int8", "--calibration", "x.npz", "--input", kind)
    answer = gmmvit_here("export", GOLDEN / "vit_gmm.pth", *words)
    also = "float32 (N, 3, 32, 32) or " if kind == "tensor" else ""
    refused(answer, f"x.npz: expected {also}uint8 (N, 32, 32, 3), got uint8 (2, 28, 28, 3)")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_precisions_that_exist_are_refused_before_the_conversion(tmp_path: Path) -> None:
    """`gmmvit convert` checks these options before it opens the images; the bundle holds a graph already."""
    (tmp_path / "model.fp16.onnx").write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"model\.fp16\.onnx exists") as caught:
        variant_from_bundle(SimpleNamespace(path=tmp_path), "fp16")  # type: ignore[arg-type]  # nothing else is read
    assert caught.value.hint == "add --force to replace the file"  # no option names the path


def test_no_message_names_the_folder_that_work_is_done_in(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, new_folder(tmp_path / "out") as folder:
        raise InputError(f"{folder / 'model.onnx'}: broken", hint=f"remove {folder}")
    assert str(caught.value) == f"{tmp_path / 'out' / 'model.onnx'}: broken"
    assert caught.value.hint == f"remove {tmp_path / 'out'}"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Input should be a valid integer, unable to parse string as an integer", "a valid integer"),
        ("'0' is not a valid integer", "a valid integer"),
        ("Input should be greater than or equal to 1", "a number greater than or equal to 1"),
        ("0 is not in the range x>=1", "a number in the range x>=1"),
    ],
)
@pytest.mark.parametrize("words", [("--top", "3", "--top", "0"), ("--top=0",)])
def test_messages_of_several_releases_of_typer(
    words: tuple[str, ...], reason: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gmmvit", "classify", *words])
    message = _expected(f"Invalid value for '--top': {reason}", SimpleNamespace(opts=["--top"]))
    assert message == f"--top: expected {expected}, got '0'"
    assert _expected("Missing argument 'IMAGE'", None) == "Missing argument 'IMAGE'"
