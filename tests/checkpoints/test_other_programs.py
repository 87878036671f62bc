"""Files and folders that other programs write: each error names the kind, and its command writes a state dict."""

from __future__ import annotations

import json
import pickle
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as parts

from gmmvit_deploy.checkpoints._model_folder import read_checkpoint
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.reading import read_tensors, require_checkpoint
from gmmvit_deploy.errors import CheckpointError

NET = nn.Linear(2, 3)
STATE: dict[str, Tensor] = NET.state_dict()


def read_as_commands_do(path: Path) -> None:
    require_checkpoint(path)
    read_checkpoint(path)


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_as_commands_do(path)
    assert str(caught.value).startswith(f"{path}: ")
    return caught.value


def distributed(path: Path, name: str = "model") -> Path:
    parts.save({name: STATE}, checkpoint_id=path)
    return path


def of_accelerate(path: Path) -> Path:
    distributed(path / "optimizer_0", "optimizer")
    return distributed(path / "pytorch_model_fsdp_0").parent


def part_of_distributed(path: Path) -> Path:
    return distributed(path) / "__0_0.distcp"


def exported(path: Path) -> Path:
    file = path.with_suffix(".pt2")
    torch.export.save(torch.export.export(NET, (torch.zeros(1, 2),)), file)
    return file


def scripted(path: Path) -> Path:
    torch.jit.save(torch.jit.trace(NET, torch.zeros(1, 2)), path)
    return path


def whole(path: Path) -> Path:
    torch.save(NET, path)
    return path


def pickled(path: Path, content: object = STATE) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


def whole_pickled(path: Path) -> Path:
    return pickled(path, NET)


@pytest.mark.filterwarnings("ignore")  # of torch, about what it no longer recommends
@pytest.mark.parametrize(
    "write", [distributed, of_accelerate, part_of_distributed, exported, scripted, whole, pickled, whole_pickled]
)
def test_the_command_of_the_hint_writes_a_state_dict(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    command = refused(path).hint.partition("type python ")[2].removesuffix(", then give weights.pth")
    option, first, *more = shlex.split(command)
    if option == "-c":
        exec(first, {})  # noqa: S102 - a user types it
    else:
        monkeypatch.setattr(sys, "argv", ["", *more])
        runpy.run_module(first, run_name="__main__")
    tensors = read_tensors(tmp_path / "weights.pth").tensors
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {n: t.tolist() for n, t in STATE.items()}


@pytest.mark.parametrize(
    ("name", "given", "kind", "hint"),
    [
        ("lora/adapter_config.json", "lora", "an adapter of PEFT (LoRA)", "merge_and_unload()"),
        ("deepspeed/zero_to_fp32.py", "deepspeed", "a checkpoint of DeepSpeed", "deepspeed')"),
        ("zero/step/zero_pp_rank_0_mp_rank_00_model_states.pt", "zero/step", "DeepSpeed", "zero', tag='step')"),
        (
            "zero/step/zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "",
            "a part of a checkpoint of DeepSpeed",
            "tag='step')",
        ),
        ("saved/saved_model.pb", "saved", "a model of TensorFlow or Flax", "build the network in PyTorch"),
        ("hub/tf_model.h5", "hub", "a model of TensorFlow or Flax", "from_tf=True"),
        ("ckpt/model.ckpt-10.index", "", "a file of Keras or TensorFlow", "build the network in PyTorch"),
        ("model.keras", "", "a file of Keras or TensorFlow", "build the network in PyTorch"),
        ("flax_model.msgpack", "", "a file of Flax", "from_flax=True"),
        ("model.onnx", "", "an ONNX graph", "gmmvit build"),
        ("ViT-B_16.npz", "", "arrays of NumPy", "timm.create_model"),
        ("\x89HDF\r\n\x1a\n", "", "a file of Keras or TensorFlow", "build the network in PyTorch"),
        ("version https://git-lfs.github.com/spec/v1\n", "", "a pointer of Git LFS", "type git lfs pull"),
        ("<!DOCTYPE html>", "", "a web page", "download the file itself"),
    ],
)
def test_the_error_names_the_kind(name: str, given: str, kind: str, hint: str, tmp_path: Path) -> None:
    """name: of the file, or its first bytes.  given: the folder that is given in place of the file."""
    of_bytes = name.startswith(("\x89", "version", "<"))
    path = tmp_path / ("file.pth" if of_bytes else name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(name.encode("latin-1") + bytes(100) if of_bytes else b"")
    error = refused(tmp_path / given if given else path)
    assert kind in str(error)
    assert hint in error.hint


@pytest.mark.parametrize("name", ["blocks.0.qkv.lora_A.weight", "blocks.0.qkv.lora_B.default.weight", "qkv.lora_A"])
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_tensors_of_an_adapter_are_merged_first(name: str, ending: str, tmp_path: Path) -> None:
    """Some training loops save the adapter beside the weights of the model."""
    state, path = {**STATE, name: torch.zeros(2, 2)}, tmp_path / f"file{ending}"
    save_file(state, path) if ending == ".safetensors" else torch.save(state, path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    error = caught.value
    assert f"the tensor {name}" in str(error)
    assert "merge_and_unload()" in error.hint


def test_tensors_of_a_process_are_gathered_first(tmp_path: Path) -> None:
    """As each process of FSDP saves them: `DTensor`, which only all processes together can read."""
    (tmp_path / "rank0.pth").write_bytes(b"\x80\x02ctorch.distributed.tensor\nDTensor\n.")
    assert "full_state_dict=True" in refused(tmp_path / "rank0.pth").hint


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("head.weight", "head.bias"), ("head.weight", "head.bias")),
        (("model.head.weight", "model.head.bias"), ("head.weight", "head.bias")),
        (("backbone.weight", "head.bias"), ("backbone.weight", "head.bias")),
    ],
)
def test_parts_are_read_by_their_index(names: tuple[str, str], read: tuple[str, str], tmp_path: Path) -> None:
    """As accelerate's save_model writes them, without a config.json."""
    placed = {name: f"model-{number}.safetensors" for number, name in enumerate(names)}
    for name, file in placed.items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert str(index) in refused(tmp_path).hint
    assert set(read_checkpoint(index).tensors) == set(read)


def test_a_folder_without_a_configuration_names_its_weights(tmp_path: Path) -> None:
    """As accelerate's save_state writes it."""
    for name in ("optimizer.bin", "random_states_0.pkl", "model.safetensors"):
        (tmp_path / name).write_bytes(np.zeros(3).tobytes())
    assert f"give the file of the weights, {tmp_path / 'model.safetensors'}" in refused(tmp_path).hint
