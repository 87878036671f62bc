"""Damaged, hostile and misdescribed files of models that timm builds, through ``gmmvit export``.

Each is refused with two clear lines: ``Error:`` names the file or the option, ``hint:`` names what to type. There is no
traceback, nothing of the file runs, and nothing is written.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from tests.checkpoints.test_hostile_files import Calls, Ordinary
from tests.cli.terminal import gmmvit_here
from tests.conftest import GOLDEN, MANIFEST, golden

pytestmark = pytest.mark.rest

pytest.importorskip("timm")

FOLDER = GOLDEN / "timm"
NAMES = tuple(name for name, entry in MANIFEST.items() if entry["folder"] == FOLDER)
FOLDERS = tuple(name for name in NAMES if golden(name).path.is_dir())
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


def content_of(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return dict(load_file(path / "model.safetensors"))
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def state_of(content: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict that the golden hints select."""
    return next((content[key] for key in ("state_dict", "model", "teacher") if key in content), content)


@functools.cache
def used_keys(name: str) -> list[str]:
    """Return some keys that the model reads: the first, some in the middle, and the last two."""
    keys = [key for key in state_of(content_of(golden(name).path)) if "last_layer" not in key and "head.mlp" not in key]
    keys = [key for key in keys if "num_batches_tracked" not in key]
    return [keys[0], keys[len(keys) // 3], keys[len(keys) // 2], keys[-2], keys[-1]]


def changed_copy(name: str, work: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of a golden file whose state dict was changed."""
    path = golden(name).path
    content = content_of(path)
    change(state_of(content))
    if path.is_dir():
        copy = shutil.copytree(path, work / name, dirs_exist_ok=True)
        save_file(content, copy / "model.safetensors")
        return copy
    torch.save(content, work / path.name)
    return work / path.name


# ---- tensors -------------------------------------------------------------------------------------------------------


@each_file
def test_missing_key(name: str, work: Path) -> None:
    for key in used_keys(name)[:4:3]:
        path = changed_copy(name, work, lambda state, key=key: state.pop(key))  # type: ignore[misc]
        error, hint = refusal(path, *options_of(name))
        assert str(path) in error
        assert key.removeprefix("_orig_mod.module.").removeprefix("backbone.") in error
        assert "type --" in hint or "complete and unchanged" in hint


def _longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


def _nested(tensor: Tensor) -> Tensor:
    return tensor[None].clone()


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half()


def _empty(tensor: Tensor) -> Tensor:
    return tensor.new_zeros((0, *tensor.shape[1:]))


@each_file
def test_other_shape_or_type(name: str, work: Path) -> None:
    first, second = (_longer, _halved) if NAMES.index(name) % 2 else (_nested, _empty)
    for key, change in zip(used_keys(name)[2:4], (first, second), strict=True):
        path = changed_copy(name, work, lambda state, key=key, change=change: state.update({key: change(state[key])}))  # type: ignore[misc]
        error, hint = refusal(path, *options_of(name))
        assert str(path) in error
        assert hint


@each_file
def test_nan_in_a_used_tensor(name: str, work: Path) -> None:
    key = used_keys(name)[1]

    def spoil(state: dict[str, Any]) -> None:
        state[key] = state[key].clone()
        state[key].view(-1)[-1] = float("nan")

    path = changed_copy(name, work, spoil)
    error, hint = refusal(path, *options_of(name))
    assert "1 of" in error
    assert "NaN or infinite" in error
    assert "every result of the model would be meaningless" in error
    assert hint == "use another checkpoint: the training diverged, or the file is damaged"


# ---- hostile and truncated files -----------------------------------------------------------------------------------


@each_file
def test_hostile_namespace(name: str, work: Path) -> None:
    path, marker = golden(name).path, work / "ran"
    content = content_of(path)
    if path.is_dir():
        shutil.copytree(path, work / name)
        (work / name / "model.safetensors").unlink()
    target = work / name / "pytorch_model.bin" if path.is_dir() else work / path.name
    content = content if state_of(content) is not content else {"state_dict": content}
    for value, named in (
        (os.system, "system"),
        (Calls(os.system, f"touch {marker}"), "system"),
        (Ordinary(), "Ordinary"),
        (torch.nn.Linear, "Linear"),
        ([{"deep": (argparse.Namespace(run=Calls(os.system, f"touch {marker}")),)}], "system"),
    ):
        args = argparse.Namespace(**(vars(content["args"]) if "args" in content else {}), evil=value)
        torch.save({**content, "args": args}, target)
        error, hint = refusal(work / name if path.is_dir() else target, *options_of(name))
        assert str(target) in error
        assert named in error
        assert "no code of the file was run" in error
        assert "save torch.save" in hint
    assert not marker.exists()


@each_file
def test_truncated_file(name: str, work: Path) -> None:
    path = golden(name).path
    file = path / "model.safetensors" if path.is_dir() else path
    target = (shutil.copytree(path, work / name) / file.name) if path.is_dir() else work / file.name
    data = file.read_bytes()
    for size in (0, 4, 30, len(data) // 2, len(data) - 10):
        target.write_bytes(data[:size])
        error, hint = refusal(work / name if path.is_dir() else target, *options_of(name))
        assert str(target) in error
        assert "truncated or damaged" in error or "damaged safetensors" in error or "of another kind" in error
        assert "again" in hint or "give the path" in hint


@pytest.mark.parametrize("damage", ["truncated", "missing", "shape", "nan", "hostile", "nothing"])
def test_damaged_head_file(damage: str, work: Path) -> None:
    content = content_of(HEAD)
    state, path, marker = state_of(content), work / "head.pth", work / "ran"
    weight, bias = state
    if damage == "missing":
        del state[bias]
    elif damage == "shape":
        state[weight] = state[weight][:, :-1].clone()
    elif damage == "nan":
        state[weight][0, 0] = float("nan")
    elif damage == "hostile":
        content["args"] = argparse.Namespace(x=Calls(os.system, f"touch {marker}"))
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
    "empty": ("", "expected JSON", "copy or download config.json again"),
    "cut": (json.dumps(BASE)[:100], "expected JSON", "copy or download config.json again"),
    "not text": ("\udcff", "expected JSON", "copy or download config.json again"),
    "deeply nested": ("[" * 100_000, "expected JSON", "copy or download config.json again"),
    "list": ("[]", "expected a JSON object", "copy or download config.json again"),
    "no architecture": ("{}", "under 'architecture'", "--model and --model-args"),
    "architecture number": (config(architecture=3), "under 'architecture'", "--model and --model-args"),
    "architecture empty": (config(architecture=""), "under 'architecture'", "--model and --model-args"),
    "architecture unknown": (config(architecture="vit_nothing"), "no architecture 'vit_nothing'", "type --model"),
    "architecture of a path": (config(architecture="../../x"), "no architecture '../../x'", "type --model"),
    "architecture other": (config(architecture="resnet18"), "timm cannot build", "type --model-args"),
    "architecture hub": (config(architecture="hf-hub:timm/x"), "downloads nothing", "type --model"),
    "architecture hf_hub": (config(architecture="hf_hub:timm/x"), "downloads nothing", "type --model"),
    "architecture folder": (config(architecture="local-dir:/tmp"), "downloads nothing", "type --model"),
    "architecture address": (config(architecture="https://example.org/x"), "downloads nothing", "type --model"),
    "architecture of torchvision": (config(architecture="torchvision:VisionTransformer"), "no architecture", "--model"),
    "url": (config(url="https://example.org/x"), "has url 'https://example.org/x'", "remove url"),
    "url of weights": (cfg(url="https://example.org/x"), "downloads nothing", "remove url"),
    "hub id": (cfg(hf_hub_id="timm/x"), "downloads nothing", "remove hf_hub_id"),
    "file": (cfg(file="/etc/passwd"), "reads only the weights in the folder", "remove file"),
    "pretrained": (args(pretrained=True), "the argument pretrained is not supported", "remove pretrained"),
    "pretrained_cfg": (args(pretrained_cfg={"file": "/etc/passwd"}), "can name files", "remove pretrained_cfg"),
    "overlay": (args(pretrained_cfg_overlay={"url": "x"}), "can name files", "remove pretrained_cfg_overlay"),
    "other weights": (args(checkpoint_path="/etc/passwd"), "come from the checkpoint", "remove checkpoint_path"),
    "source arguments": (args(pretrained_model_args={"a": 1}), "not supported", "remove pretrained_model_args"),
    "features": (args(features_only=True), "features, not logits", "remove features_only"),
    "arguments in a list": (config(model_args=[]), "an object under 'model_args', got list", "config.json again"),
    "arguments in a text": (config(model_args="x"), "an object under 'model_args', got str", "config.json again"),
    "cfg in a text": (config(pretrained_cfg="x"), "an object under 'pretrained_cfg', got str", "config.json again"),
    "unknown argument": (args(nonsense=1), "unexpected keyword argument 'nonsense'", "type --model-args"),
    "nested argument": (args(norm_layer={"a": {"b": [1]}}), "timm cannot build", "type --model-args"),
    "function by name": (args(norm_layer="os.system"), "timm cannot build", "type --model-args"),
    "class by name": (args(block_fn="os.system"), "timm cannot build", "type --model-args"),
    "heads": (args(num_heads=7), "timm cannot build", "type --model-args"),
    "no heads": (args(num_heads=0), "timm cannot build", "type --model-args"),
    "depth text": (args(depth="x"), "timm cannot build", "type --model-args"),
    "depth": (args(depth=3), "do not fit", "type --model"),
    "endless depth": (args(depth=10**8), "more blocks than the file has tensors (36)", "--model-args with the depth"),
    "endless width": (args(embed_dim=10**9), "timm cannot build", "type --model-args"),
    "size text": (args(img_size="x"), "the argument img_size is 'x'", "type --image-size"),
    "size nested": (args(img_size=[{}, {}]), "the argument img_size is", "type --image-size"),
    "size negative": (args(img_size=-4), "the argument img_size is -4", "type --image-size"),
    "size endless": (args(img_size=10**9), "from 1 to 16384 pixels", "type --image-size"),
    "size other": (args(img_size=48), "pos_embed has shape (1, 64, 32)", "--image-size"),
    "mean text": (cfg(mean="x"), "mean of the preprocessing: expected 3 numbers, got 'x'", "correct mean"),
    "mean short": (cfg(mean=[0.5]), "expected 3 numbers", "correct mean"),
    "mean not finite": (cfg(mean=[0.5, 0.5, float("nan")]), "expected 3 numbers", "correct mean"),
    "std zero": (cfg(std=[0.5, 0, 0.5]), "expected numbers above 0", "correct std"),
    "crop text": (cfg(crop_pct="x"), "expected a number above 0, got 'x'", "correct crop_pct"),
    "crop negative": (cfg(crop_pct=-1), "expected a number above 0, got -1", "correct crop_pct"),
    "filter object": (cfg(interpolation={"a": 1}), "interpolation of the preprocessing", "correct interpolation"),
    "crop mode number": (
        cfg(crop_mode=7),
        "crop_mode of the preprocessing: expected center, squash, border, got 7",
        "correct crop_mode",
    ),
    "crop mode unknown": (cfg(crop_mode="nothing"), "expected center, squash, border", "correct crop_mode"),
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


# ---- options -------------------------------------------------------------------------------------------------------

WRONG_OPTIONS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # case: (file, changed options, part of the error, part of the hint)
    "no weights": ("timm_vit", {"weights": None}, "whose logits differ", "type --set weights=trained"),
    "no model-args": ("timm_deit_distilled", {"model_args": None}, "do not fit", "--model-args"),
    "no architecture": ("timm_vit_qk_norm", {"model": None}, "unknown architecture", "type --model with timm's name"),
    "no size": ("timm_vit_qk_norm", {"image_size": None}, "do not fit", "--image-size"),
    "other architecture": ("timm_deit_distilled", {"model": "vit_tiny_patch16_224"}, "dist_token", "type --model"),
    "no ViT": ("timm_vit", {"model": "convnext_atto"}, "head.fc.weight of convnext_atto is missing", "type --model"),
    "unknown model": ("timm_vit", {"model": "vit_nothing"}, "--model: timm", "type --model with a name of timm"),
    "empty model": ("timm_vit", {"model": "timm:"}, "--model: timm", "type --model with a name of timm"),
    "hub": ("timm_vit", {"model": "hf-hub:timm/x"}, "--model: 'hf-hub:timm/x' makes timm read", "type --model"),
    "depth": ("timm_vit", {"model_args": {"depth": 3}}, "blocks.2.norm1.weight", "--model-args"),
    "pretrained": ("timm_vit", {"model_args": {"pretrained": True}}, "--model-args: the argument", "remove pretrained"),
    "size of the file": ("timm_vit", {"image_size": 33}, "--image-size 33 contradicts the file", "omit --image-size"),
    "size of a Swin": ("timm_swin", {"image_size": 48}, "--image-size 48 contradicts the file", "omit --image-size"),
    "size of tensors": ("timm_vit_qk_norm", {"image_size": 48}, "pos_embed has shape (1, 65, 36)", "--image-size"),
    "endless strides": (
        "torchvision_vit_conv_stem",
        {"model_args": {"num_heads": 4, "conv_stem_strides": [10**9, 2, 2]}},
        "cannot build",
        "type --model-args",
    ),
    "no strides": ("torchvision_vit_conv_stem", {"model_args": {"num_heads": 4}}, "no tensor of this file", "strides"),
    "head blocks": ("dino_linear", {"head_blocks": 4}, "--set head_blocks=4: 24", "type --set head_blocks=3"),
    "too many blocks": ("dino_linear", {"head_blocks": 9}, "--set head_blocks=9", "type --set head_blocks=3"),
    "no head": ("dino_linear", {"head": None, "head_blocks": None}, "no classifier", "add --head FILE"),
    "no class token": (
        "dino_linear",
        {"model": "swin_tiny_patch4_window7_224", "model_args": None},
        "has no class token",
        "type --model",
    ),
    "averaged teacher": ("dino_linear", {"weights": "averaged"}, "the teacher is taken", "leave --set weights out"),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_options(case: str, work: Path) -> None:
    name, changes, part, advice = WRONG_OPTIONS[case]
    path = golden(name).path
    copy = work / path.name
    _ = shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
    error, hint = refusal(copy, *options_of(name, **changes))
    assert part in error
    assert str(copy) in error or error.startswith("--")
    assert advice in hint


def test_closed_form_without_a_mixture(work: Path) -> None:
    copy = Path(shutil.copy(golden("timm_vit").path, work / "vit.pth.tar"))
    error, hint = refusal(copy, *options_of("timm_vit"), "--set", "closed_form=yes")
    assert "holds no Gaussian mixture" in error
    assert hint == "leave --set closed_form out"


# ---- the real command, and the network -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm_vit", "timm_swin"])
def test_real_command(name: str, work: Path, gmmvit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    key = used_keys(name)[2]
    path = changed_copy(name, work, lambda state: state.pop(key))
    ended = gmmvit("export", path, "-o", work / "bundle", "--input", "tensor", *options_of(name))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert f"Error: {path}" in ended.stderr.replace("\n", "")
    assert "hint: type --model" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [entry.name for entry in work.iterdir()] == [path.name]


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


def test_the_network_test_sees_an_attempt(connections: list[Any]) -> None:
    with pytest.raises(OSError, match="must not reach"):
        socket.create_connection(("127.0.0.1", 9))
    assert len(connections) == 1
