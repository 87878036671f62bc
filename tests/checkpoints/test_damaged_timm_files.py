"""Damaged, hostile and misdescribed files of models that timm builds, through ``gmmvit export``.

Each is refused with two clear lines: ``Error:`` names the file or the option, ``hint:`` names what to type. There is no
traceback, nothing of the file runs, and nothing is written.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from tests.checkpoints.test_hostile_files import Calls
from tests.cli.terminal import gmmvit_here
from tests.conftest import GOLDEN, MANIFEST, golden

pytestmark = pytest.mark.nightly

pytest.importorskip("timm")

FOLDER = GOLDEN / "timm"
NAMES = tuple(name for name, entry in MANIFEST.items() if entry["folder"] == FOLDER)
HEAD = FOLDER / "dino_linear.pth"
each_file = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty folder for the damaged files; the bundle would appear beside it."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def options_of(name: str, **changes: Any) -> list[str]:
    """Return the options of ``gmmvit export`` for a golden file; a change to None leaves an option out."""
    hints = {**MANIFEST[name].get("hints", {}), **changes}
    options = {"model": "--model", "image_size": "--image-size"}
    words = [word for key, option in options.items() if hints.get(key) for word in (option, str(hints[key]))]
    words += [word for key in ("weights", "head_blocks") if hints.get(key) for word in ("--set", f"{key}={hints[key]}")]
    if hints.get("model_args"):
        words += ["--model-args", json.dumps(hints["model_args"])]
    if hints.get("head"):
        words += ["--head", str(FOLDER / hints["head"])]
    return words


def refusal(path: Path, *options: str) -> tuple[str, str]:
    """Return (error, hint) of ``gmmvit export PATH``, which must fail and write nothing."""
    out = path.parent.parent / "written" / "bundle"
    answer = gmmvit_here("export", path, "-o", out, "--input", "tensor", *options, columns=10_000)
    assert answer.status == 1, answer.err
    assert answer.out == ""
    assert not out.parent.exists()
    assert "Traceback" not in answer.err
    _, _, text = answer.err.partition("Error: ")
    error, separator, hint = text.partition("\nhint: ")
    assert separator, answer.err
    assert "gmmvit --help" not in hint, "the default hint says nothing about the file"
    assert "gmmvit doctor" not in hint, "the error must be one of this package"
    return error.strip(), hint.strip()


# ---- hostile and truncated files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "missing", "shape", "nan", "hostile", "nothing"])
def test_damaged_head_file(damage: str, work: Path) -> None:
    content = torch.load(HEAD, weights_only=True)
    state, path, marker = content["state_dict"], work / "head.pth", work / "ran"
    weight, bias = state
    if damage == "missing":
        del state[bias]
    elif damage == "shape":
        state[weight] = state[weight][:, :-1].clone()
    elif damage == "nan":
        state[weight][0, 0] = float("nan")
    elif damage == "hostile":
        state["x"] = Calls(os.system, f"touch {marker}")
    elif damage == "nothing":
        content = {}
    torch.save(content, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    backbone = shutil.copy(golden("dino_linear").path, work / "backbone.pth")
    error, hint = refusal(Path(backbone), *options_of("dino_linear", head=str(path)))
    assert str(path) in error or damage == "nan"
    assert hint
    assert not marker.exists()


# ---- config.json of a model folder ---------------------------------------------------------------------------------

BASE = json.loads((FOLDER / "timm_vit_registers" / "config.json").read_text())


def config(**changes: Any) -> str:
    return json.dumps({**BASE, **changes})


def args(**changes: Any) -> str:
    return config(model_args={**BASE["model_args"], **changes})


def cfg(**changes: Any) -> str:
    return config(pretrained_cfg={**BASE["pretrained_cfg"], **changes})


BROKEN_CONFIGS: dict[str, tuple[str | None, str, str]] = {
    # case: (text of config.json, part of the error, part of the hint)
    "absent": (None, "without the config.json", "--model and --model-args"),
    "not text": ("\udcff", "expected JSON", "copy or download config.json again"),
    "deeply nested": ("[" * 100_000, "expected JSON", "copy or download config.json again"),
    "architecture unknown": (config(architecture="vit_nothing"), "no architecture 'vit_nothing'", "type --model"),
    "architecture of a path": (config(architecture="../../x"), "no architecture '../../x'", "type --model"),
    "architecture hub": (config(architecture="hf-hub:timm/x"), "downloads nothing", "type --model"),
    "architecture address": (config(architecture="https://example.org/x"), "downloads nothing", "type --model"),
    "url of weights": (cfg(url="https://example.org/x"), "downloads nothing", "remove url"),
    "hub id": (cfg(hf_hub_id="timm/x"), "downloads nothing", "remove hf_hub_id"),
    "file": (cfg(file="/etc/passwd"), "reads only the weights in the folder", "remove file"),
    "pretrained": (args(pretrained=True), "the argument pretrained is not supported", "remove pretrained"),
    "pretrained_cfg": (args(pretrained_cfg={"file": "/etc/passwd"}), "can name files", "remove pretrained_cfg"),
    "overlay": (args(pretrained_cfg_overlay={"url": "x"}), "can name files", "remove pretrained_cfg_overlay"),
    "other weights": (args(checkpoint_path="/etc/passwd"), "come from the checkpoint", "remove checkpoint_path"),
    "source arguments": (args(pretrained_model_args={"a": 1}), "not supported", "remove pretrained_model_args"),
    "function by name": (args(norm_layer="os.system"), "timm cannot build", "type --model-args"),
    "endless depth": (
        args(depth=10**8),
        "depth is 100000000, more layers than the weights have tensors (36)",
        "--model-args with the depth",
    ),
    "endless width": (args(embed_dim=10**9), "timm cannot build", "type --model-args"),
    "size endless": (args(img_size=10**9), "from 1 to 16384 pixels", "type --image-size"),
    "filter unknown": (cfg(interpolation="lanczos"), "states the resize rule center-lanczos", "type --resize"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_broken_config(case: str, work: Path) -> None:
    text, part, advice = BROKEN_CONFIGS[case]
    folder = shutil.copytree(FOLDER / "timm_vit_registers", work / "model")
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text, errors="surrogateescape")
    error, hint = refusal(folder)
    assert str(folder) in error or error.startswith("the checkpoint states")
    assert part in error
    assert advice in hint


# ---- the real command, and the network -----------------------------------------------------------------------------


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses that the test tries to reach or to resolve.  Each attempt fails; no setting keeps hubs offline."""
    attempts: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        attempts.append(arguments)
        raise OSError("a test must not reach for the network")

    for method in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, method, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return attempts


@each_file
def test_no_network_is_needed(name: str, connections: list[Any]) -> None:
    case = golden(name)
    assert load_checkpoint(case.path, case.hints).spec.family == "timm"
    assert connections == []
