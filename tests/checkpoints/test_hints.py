"""The hints of errors at checkpoints, followed: what a hint says is typed, and the checkpoint then loads.

A command of Python and the options ``--set`` are taken from the hint by themselves; a case names what a hint leaves to
the user, such as N. Hints that no test follows, each with its reason:

    bitsandbytes (transformers' dequantize)     needs the package and a GPU; tests/hugging_face reads its line
    RESAVE_HINT, "where the file was made"      needs the user's training script
    copy, download or correct a file again      needs the other file
    FSDP, DeepSpeed, TorchScript, .pt2          followed in test_other_programs.py; DeepSpeed needs its package
    FILE.py:CLASS of a code of one's own        needs the code; the own class of these cases stands for it
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

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
    if "type python -c " in hint:
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
    assert load_checkpoint(path, LoadHints(**case.options, **settings_from(settings))).spec.classes in (3, 10)
