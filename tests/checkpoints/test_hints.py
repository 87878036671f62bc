"""The hints of errors on the way from a checkpoint to a bundle, followed: what a hint says is typed, and the
checkpoint then loads, or the export begins to compute.

A command of Python and the options are taken from the hint by themselves; a case names what a hint leaves to the user,
such as N, or does what the hint says to a file. Hints that no test follows, each with its reason:

    bitsandbytes (transformers' dequantize)     needs the package and a GPU; tests/hugging_face reads its line
    RESAVE_HINT, "where the file was made"      needs the user's training script
    copy, download or correct a file again      needs the other file
    FSDP, DeepSpeed, TorchScript, .pt2          followed in test_other_programs.py; DeepSpeed needs its package
    FILE.py:CLASS of a code of one's own        needs the code; the own class of these cases stands for it
    more memory, another disk, rights           needs another machine
    roles, dynamic batch, attention of a class  change the code of a network; tests/export and tests/custom have them
    no finite logits, gates, calibration        need an export; tests/export has them
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from typer.testing import CliRunner

from gmmvit_cli.main import app
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.models.sources.hints import LoadHints, settings_from
from tests.checkpoints.test_training_files import OWN as OWN_CLASS
from tests.conftest import GOLDEN

OWN = {"model": "net.py:Net", "image_size": 32}
TINY_ARGS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
TINY = {"model": "vit_tiny_patch16_224", "model_args": TINY_ARGS}


def own_net() -> Any:
    """Return a network of the class of ``net.py`` in the current folder, which the pickles of the cases name."""
    sys.modules.pop("net", None)
    sys.path.insert(0, str(Path.cwd()))
    try:
        import net
    finally:
        sys.path.pop(0)
    return net.Net()


def state(factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in own_net().state_dict().items()}


def under(prefix: str, factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in state(factor).items()}


def backbone() -> None:
    network = timm.create_model(str(TINY["model"]), num_classes=0, **TINY_ARGS)
    torch.save({"teacher": {f"backbone.{k}": v for k, v in network.state_dict().items()}}, "file.pth")


def linear_head() -> None:
    backbone()
    torch.save(torch.nn.Linear(24, 3).state_dict(), "head.pth")


def many_heads() -> None:
    backbone()
    heads = {f"classifier_{n}_blocks_avgpool_False_lr_0_1": torch.nn.Linear(24 * n, 3) for n in (2, 1)}
    held = {f"module.classifiers_dict.{n}.linear.{k}": v for n, h in heads.items() for k, v in h.state_dict().items()}
    torch.save({"linear_classifiers": held}, "head.pth")


def class_in_arguments() -> None:
    kwargs = {**TINY_ARGS, "act_layer": torch.nn.ReLU}
    network = timm.create_model(str(TINY["model"]), num_classes=3, **kwargs)
    stated = dict.fromkeys(("crop_pct", "mean", "std", "interpolation"))
    args = Namespace(model=TINY["model"], model_kwargs=kwargs, **stated)
    torch.save({"args": args, "state_dict": network.state_dict()}, "file.pth")


def saved(content: Callable[[], Any]) -> Callable[[], None]:
    return lambda: torch.save(content(), "file.pth")


def golden(name: str) -> Callable[[], None]:
    return lambda: Path("file.pth").write_bytes((GOLDEN / name).read_bytes())


@dataclass(frozen=True, kw_only=True)
class Case:
    """write: writes file.pth in the current folder.  options, settings: as typed; the settings after ``--set``.
    fill: text of the hint → what the user types for it.
    """

    write: Callable[[], None]
    options: dict[str, Any]
    settings: tuple[str, ...] = ()
    fill: tuple[str, str] = ("", "")


CHANNELS = ("channels=3",)
CASES = {
    "trained and averaged": Case(
        write=saved(lambda: {"state_dict": state(), "state_dict_ema": state(2)}), options=OWN, settings=CHANNELS
    ),
    "several sets": Case(write=saved(lambda: {"model": state(), "net": state(2)}), options=OWN, settings=CHANNELS),
    "an average without name": Case(
        write=saved(lambda: {"model": state(), "ema": {"shadow": state(2)}}), options=OWN, settings=CHANNELS
    ),
    "two networks": Case(
        write=saved(lambda: {**under("student"), **under("teacher", 2)}), options=OWN, settings=CHANNELS
    ),
    "a key that is not there": Case(
        write=saved(lambda: {"model": state(), "ema": {"shadow": state(2)}}),
        options=OWN,
        settings=(*CHANNELS, "weights=emma"),
    ),
    "a single set": Case(
        write=saved(lambda: {"model": state()}), options=OWN, settings=(*CHANNELS, "weights=averaged")
    ),
    "a bare set": Case(write=saved(state), options=OWN, settings=(*CHANNELS, "weights=trained")),
    "a whole network": Case(write=saved(own_net), options=OWN, settings=CHANNELS),
    "a whole network under a key": Case(
        write=saved(lambda: {"model": own_net(), "epoch": 3}), options=OWN, settings=CHANNELS
    ),
    "a whole network under another key": Case(
        write=saved(lambda: {"trainer": own_net()}), options=OWN, settings=CHANNELS
    ),
    "arrays": Case(
        write=saved(lambda: {"state_dict": {name: tensor.numpy() for name, tensor in state().items()}}),
        options=OWN,
        settings=CHANNELS,
    ),
    "no channels": Case(write=saved(state), options=OWN, fill=("channels=N", "channels=3")),
    "heads of an own class": Case(write=saved(state), options=OWN, settings=(*CHANNELS, "heads=3")),
    "no number of blocks": Case(
        write=linear_head, options={**TINY, "head": "head.pth"}, fill=("head_blocks=N", "head_blocks=1")
    ),
    "too many blocks": Case(write=linear_head, options={**TINY, "head": "head.pth"}, settings=("head_blocks=2",)),
    "many heads": Case(write=many_heads, options={**TINY, "head": "head.pth"}),
    "another fact than the name": Case(
        write=many_heads,
        options={**TINY, "head": "head.pth"},
        settings=("head_name=classifier_1_blocks_avgpool_False_lr_0_1", "head_blocks=2"),
    ),
    "a name for a file with one head": Case(
        write=linear_head, options={**TINY, "head": "head.pth"}, settings=("head_blocks=1", "head_name=best")
    ),
    "other heads than the file": Case(write=golden("vit_gmm.pth"), options={}, settings=("heads=7",)),
    "heads that no tensor shows": Case(write=golden("vit_plain.pth"), options={}, fill=("heads=N", "heads=3")),
    "a class in the arguments": Case(write=class_in_arguments, options={}, fill=("VALUE", '"relu"')),
    "a form that no mask has": Case(write=golden("vit_plain.pth"), options={}, settings=("heads=3", "closed_form=yes")),
    "a source of another file": Case(write=golden("vit_gmm.pth"), options={}, settings=("source=vit-pytorch",)),
    "a fact of another family": Case(write=golden("vit_gmm.pth"), options={}, settings=("scale_adjustment=0.5",)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_hint_works_when_it_is_followed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(OWN_CLASS)
    case = CASES[name]
    case.write()
    path, settings = Path("file.pth"), case.settings
    with pytest.raises(GmmvitError) as caught:
        load_checkpoint(path, LoadHints(**case.options, **settings_from(settings)))
    hint = caught.value.hint.replace(*case.fill) if case.fill[0] else caught.value.hint
    options = case.options
    if "type --model-args '" in hint:
        arguments = shlex.split(hint.partition("type --model-args ")[2])[0]
        options = {**options, "model_args": json.loads(arguments)}
    elif "type python -c " in hint:
        assert "runs code in the file" in hint
        command = shlex.split(hint.partition("type python ")[2].partition(", then give ")[0])
        exec(command[1], {})  # noqa: S102 - a user types it; a Python of its own would import torch for seconds
        path = Path("weights.pth")
    else:
        removed = set(re.findall(r"(?:leave|omit) --set (\w+)(?: out)?", hint))
        added = [text.rstrip(";,") for text in re.findall(r"--set (\w+=[^ ,;]+)", hint) if not text.endswith("=NAME")]
        assert removed or added, hint
        new = added[:1] if not removed else []
        names = removed | {text.partition("=")[0] for text in new}
        settings = (*(text for text in settings if text.partition("=")[0] not in names), *new)
    assert load_checkpoint(path, LoadHints(**options, **settings_from(settings))).spec.classes in (3, 10)


GMM = {"--mean": "0.5,0.5,0.5", "--std": "0.5,0.5,0.5"}
NAMES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MULTI = {**GMM, "--task": "multi"}


def file_and(*lines: str, name: str = "names.txt", encoding: str = "utf-8") -> Callable[[], None]:
    """Return a function that writes a checkpoint of 10 classes, and a text file."""

    def write() -> None:
        golden("vit_gmm.pth")()
        Path(name).write_text("\n".join(lines), encoding=encoding)

    return write


def text(*lines: str, name: str = "names.txt") -> Callable[[str], None]:
    """Return a function that does what a hint says to a text file: ``lines`` are its lines afterwards."""

    def write(hint: str) -> None:
        Path(name).write_text("\n".join(lines), encoding="utf-8")

    return write


def converted(hint: str) -> None:
    command = re.search(r"iconv -f \S+ -t utf-8", hint)
    assert command is not None, hint
    made = subprocess.run([*shlex.split(command[0]), "names.txt"], capture_output=True, check=True)
    Path("names.txt").write_bytes(made.stdout)


def folder(name: str = "vit", file: str = "config.json", **changes: Any) -> Callable[[], None]:
    """Return a function that writes a model folder of transformers, with changed fields of one of its files."""

    def write() -> None:
        pytest.importorskip("transformers")
        from tests.hugging_face.folders import edited, saved

        edited(saved(name, Path("file.pth")), file, **changes)

    return write


def corrected(file: str = "config.json", **changes: Any) -> Callable[[str], None]:
    def correct(hint: str) -> None:
        path = Path("file.pth", file)
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return correct


@dataclass(frozen=True, kw_only=True)
class Export:
    """write: writes file.pth, a file or a folder.  typed: option → value.  fill: as in `Case`.
    do: does to a file what the hint says, for a hint without an option.
    """

    write: Callable[[], None]
    typed: dict[str, str]
    fill: tuple[str, str] = ("", "")
    do: Callable[[str], None] | None = None


EXPORTS = {
    "fewer labels than classes": Export(
        write=file_and(*NAMES),
        typed={**GMM, "--labels": "cat,dog"},
        fill=("--labels with a file", "--labels names.txt"),
    ),
    "no file of labels": Export(
        write=file_and(*NAMES), typed={**GMM, "--labels": "classes.txt"}, fill=("--labels FILE", "--labels names.txt")
    ),
    "labels in Latin-1": Export(
        write=file_and("caf\u00e9", *NAMES[1:], encoding="latin-1"),
        typed={**GMM, "--labels": "names.txt"},
        do=converted,
    ),
    "labels with a wrong index": Export(
        write=file_and(*(f"{index} {name}" for index, name in enumerate(NAMES, 1))),
        typed={**GMM, "--labels": "names.txt"},
        do=text(*(f"{index} {name}" for index, name in enumerate(NAMES))),
    ),
    "labels with further columns": Export(
        write=file_and(*(f"{index},{name},more" for index, name in enumerate(NAMES))),
        typed={**GMM, "--labels": "names.txt"},
        do=text(*(f"{index},{name}" for index, name in enumerate(NAMES))),
    ),
    "labels as a list of another form": Export(
        write=file_and(*(f"- {name}" for name in NAMES)), typed={**GMM, "--labels": "names.txt"}, do=text(*NAMES)
    ),
    "labels in broken JSON": Export(
        write=file_and("[", *NAMES, "]"), typed={**GMM, "--labels": "names.txt"}, do=text(json.dumps(NAMES))
    ),
    "labels without logits": Export(
        write=file_and(*NAMES), typed={**GMM, "--labels": "names.txt", "--outputs": "features"}
    ),
    "mean and std up to 255": Export(
        write=golden("vit_gmm.pth"), typed={"--mean": "123.7,116.3,103.5", "--std": "58.4,57.1,57.4"}
    ),
    "std up to 255": Export(
        write=golden("vit_gmm.pth"), typed={"--mean": "0.485,0.456,0.406", "--std": "58.4,57.1,57.4"}
    ),
    "mean of one channel": Export(
        write=golden("vit_gmm.pth"),
        typed={"--mean": "0.5", "--std": "0.5"},
        fill=("--mean and --std with the values of training", "--mean 0.5,0.4,0.3 --std 0.2,0.2,0.2"),
    ),
    "mean without std": Export(write=golden("vit_gmm.pth"), typed={"--mean": "0.5,0.5,0.5"}),
    "mean beside a data set": Export(write=golden("vit_gmm.pth"), typed={**GMM, "--dataset": "cifar10"}),
    "neither mean nor std": Export(write=golden("vit_gmm.pth"), typed={}, fill=("--dataset NAME", "--dataset cifar10")),
    "a crop by a rule that stretches": Export(
        write=golden("vit_gmm.pth"), typed={**GMM, "--resize": "stretch-bilinear", "--crop-pct": "0.9"}
    ),
    "several labels without thresholds": Export(
        write=file_and(*["0.5"] * 10, name="numbers.txt"),
        typed=MULTI,
        fill=("--thresholds FILE", "--thresholds numbers.txt"),
    ),
    "thresholds of one label": Export(write=golden("vit_gmm.pth"), typed={**GMM, "--thresholds": "0.5"}),
    "fewer thresholds than labels": Export(
        write=file_and("0.5", "0.5", name="numbers.txt"),
        typed={**MULTI, "--thresholds": "numbers.txt"},
        do=text(*["0.5"] * 10, name="numbers.txt"),
    ),
    "a threshold that is no probability": Export(
        write=file_and(*["50"] * 10, name="numbers.txt"),
        typed={**MULTI, "--thresholds": "numbers.txt"},
        do=text(*["0.5"] * 10, name="numbers.txt"),
    ),
    "a threshold of no label": Export(
        write=file_and(json.dumps(dict.fromkeys((*NAMES[1:], "plane"), 0.5)), name="t.json"),
        typed={**MULTI, "--labels": ",".join(NAMES), "--thresholds": "t.json"},
        do=text(json.dumps(dict.fromkeys(NAMES, 0.5)), name="t.json"),
    ),
    "no file of thresholds": Export(
        write=file_and(*["0.5"] * 10, name="numbers.txt"),
        typed={**MULTI, "--thresholds": "limits.txt"},
        fill=("--thresholds FILE", "--thresholds numbers.txt"),
    ),
    "thresholds without logits": Export(write=golden("vit_gmm.pth"), typed={**MULTI, "--outputs": "features"}),
    "an image processor of another kind": Export(write=folder(file="preprocessor_config.json", do_pad=True), typed={}),
    "an option that config.json states": Export(write=folder(), typed={"--model": "vit_tiny_patch16_224"}),
    "no class of the model": Export(
        write=folder(architectures=[]), typed={}, do=corrected(architectures=["ViTForImageClassification"])
    ),
    "no label for each class": Export(
        write=folder(id2label={str(index): f"class {index}" for index in (0, 1, 2, 3, 5)}),
        typed={},
        do=corrected(id2label={str(index): f"class {index}" for index in range(5)}),
    ),
    "a task of config.json": Export(
        write=folder(problem_type="multi_label_classification"),
        typed={},
        fill=("--thresholds FILE", "--thresholds 0.5"),
    ),
    "a backbone": Export(write=folder("swin_backbone"), typed={}),
    "a class token of a backbone": Export(write=folder("vit_backbone"), typed={"--outputs": "features"}),
}
_OPTION = re.compile(r"(--[a-z][a-z-]*) ('[^']*'|[^\s;,]+(?:,[^\s;,]+)*)")


def following(hint: str, typed: dict[str, str]) -> dict[str, str]:
    """Return the options after the first way of a hint."""
    way = re.split(r"; (?!also)|, or |\. ", hint.rpartition("otherwise ")[2])[0]
    left_out = " ".join(re.findall(r"(?:leave|omit|without) (--[^,;]+)", way))
    removed = re.findall(r"--[a-z-]+", left_out)
    added = {option: value.strip("'") for option, value in _OPTION.findall(way.replace(left_out, ""))}
    assert removed or added, hint
    return {option: value for option, value in typed.items() if option not in removed} | added


class ReadyError(Exception):
    """The export has read all options and files, and begins to compute."""


def exported(typed: dict[str, str]) -> Any:
    words = [word for option in typed.items() for word in option]
    return CliRunner().invoke(app, ["export", "file.pth", "-o", "bundle", *words]).exception


@pytest.mark.parametrize("name", EXPORTS)
def test_the_export_begins_when_the_hint_is_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready(*_: object) -> None:
        raise ReadyError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gmmvit_deploy.export.bundle_from_checkpoint.golden_from_model", ready)
    case = EXPORTS[name]
    case.write()
    error, typed = exported(case.typed), case.typed
    assert isinstance(error, GmmvitError), error
    if case.do is not None:
        case.do(error.hint)
    else:
        typed = following(error.hint.replace(*case.fill) if case.fill[0] else error.hint, typed)
    after = exported(typed)
    assert isinstance(after, ReadyError), (error.hint, typed, after, getattr(after, "hint", ""))
