from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file, save_model
from torch import nn

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints._model_folder import read_checkpoint
from gmmvit_deploy.checkpoints.reading import read_tensors, require_checkpoint, weights_bytes
from gmmvit_deploy.errors import CheckpointError


def _flipped(source: Path, target: Path, record: str) -> None:
    """Write a copy of an archive with a bit of the record flipped."""
    with zipfile.ZipFile(source) as archive:
        content = next(archive.read(name) for name in archive.namelist() if name.endswith(record))
    data = bytearray(source.read_bytes())
    data[data.index(content) + len(content) // 2] ^= 1
    target.write_bytes(bytes(data))


@pytest.mark.parametrize(("record", "message"), [("/data/0", "damaged at tensor a "), ("/data.pkl", "damaged")])
def test_flipped_bit(tmp_path: Path, record: str, message: str) -> None:
    path = tmp_path / "whole.pth"
    torch.save({"a": torch.arange(100.0), "b": torch.arange(7.0)}, path)
    assert read_tensors(path).tensors["a"][50] == 50
    _flipped(path, tmp_path / "flipped.pth", record)
    with pytest.raises(CheckpointError, match=rf"flipped\.pth: the file is truncated or {message}"):
        read_tensors(tmp_path / "flipped.pth")


def test_file_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(100.0)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "a.pth") as archive:
        assert {record.CRC for record in archive.infolist()} == {0}
    assert read_tensors(tmp_path / "a.pth").tensors["a"][50] == 50


def test_bundle_in_place_of_a_checkpoint(bundle: Bundle) -> None:
    with pytest.raises(CheckpointError, match="this path is a bundle") as caught:
        require_checkpoint(bundle.path)
    assert str(bundle.path / "weights.safetensors") in caught.value.hint


@pytest.mark.parametrize("content", [{"a": 1}, torch.zeros(3)], ids=["numbers", "a tensor"])
def test_not_a_state_dict(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=r"file\.pth"):
        read_tensors(tmp_path / "file.pth")


def test_absent_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_tensors(tmp_path / "nowhere.pth")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["pth", "safetensors", "folder", "parts", "index"])
def test_the_size_of_weights_without_reading_them(kind: str, tmp_path: Path) -> None:
    state = {"a.weight": torch.zeros(3, 4, dtype=torch.float16), "a.bias": torch.zeros(3)}
    path = tmp_path / "model.safetensors"
    if kind == "pth":
        path = tmp_path / "checkpoint.pth"
        torch.save({"state_dict": state, "optimizer": {"state": torch.zeros(1000)}}, path)
    elif kind in ("parts", "index"):
        path = tmp_path / "model.safetensors.index.json"
        parts = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(state)}
        for name, part in parts.items():
            save_file({name: state[name]}, tmp_path / part)
            (tmp_path / part).with_suffix(".bin").write_bytes(b"the same part in another format")
        path.write_text(json.dumps({"weight_map": parts}))
    else:
        save_file(state, path)
    assert weights_bytes(tmp_path if kind in ("folder", "parts") else path) == 4 * 15


@pytest.mark.parametrize("written", ["file", "parts", "with a prefix"])
def test_tensors_that_were_stored_once_have_all_their_names(written: str, tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    network = nn.Sequential(layer, nn.Linear(4, 4), layer)
    path = tmp_path / "model.safetensors"
    if written == "parts":
        save_torch_state_dict(network.state_dict(), tmp_path, max_shard_size=100)
        path = tmp_path / "model.safetensors.index.json"
    else:
        save_model(network if written == "file" else nn.ModuleDict({"model": network}), str(path))
    read = read_checkpoint(path).tensors
    assert read.keys() == network.state_dict().keys()
    assert all(read[name].equal(tensor) for name, tensor in network.state_dict().items())
