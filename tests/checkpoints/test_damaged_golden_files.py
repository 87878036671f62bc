"""Damaged copies of each golden checkpoint: every copy is refused with an error that names it, and nothing is written.

Nothing is exported here. tests/checkpoints/test_damaged_timm_files.py has configurations and options of timm; the tests
of the families have damages that only their files can have.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gmmvit_deploy.checkpoints._wrapping import names_without_prefix
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from tests.conftest import MANIFEST, NAMES, golden
from tests.golden_files import RELEASED, content_of, state_of

State = dict[str, Tensor]
WEIGHTS = "model.safetensors"
OF_OTHER_CODE = tuple(name for name in NAMES if name not in RELEASED)
ONE_OF_EACH_SOURCE = {MANIFEST[name]["folder"].name: name for name in reversed(OF_OTHER_CODE)}.values()
each_source = pytest.mark.parametrize("name", ONE_OF_EACH_SOURCE)


@functools.cache
def used_keys(name: str) -> tuple[str, str, str]:
    """Return the first, the middle and the last key that the network reads."""
    case = golden(name)
    unused = load_checkpoint(case.path, case.hints).unused
    state = state_of(content_of(name))
    plain = names_without_prefix(state).names
    keys = [
        key for key, tensor in state.items() if key in plain and plain[key] not in unused and torch.is_tensor(tensor)
    ]
    return keys[0], keys[len(keys) // 2], keys[-1]


def shown(key: str) -> str:
    """Return the name of a tensor in messages: without the prefixes of wrapped and compiled networks."""
    return names_without_prefix([key]).names[key]


def damaged(name: str, folder: Path, change: Callable[[State], object]) -> Path:
    """Write a copy of a golden file whose tensors were changed."""
    content = content_of(name)
    change(state_of(content))
    return written(name, folder, content)


def written(name: str, folder: Path, content: dict[str, Any]) -> Path:
    """Write a file, or for a model folder a copy of the folder, with other content."""
    source, path = golden(name).path, folder / golden(name).path.name
    if source.is_dir():
        shutil.copytree(source, path, dirs_exist_ok=True)
        (path / WEIGHTS).unlink(missing_ok=True)
        torch.save(content, path / "pytorch_model.bin")
    else:
        torch.save(content, path)
    return path


def refusal(name: str, path: Path) -> str:
    """Return the message of the export, which must fail with an error of a checkpoint and write nothing."""
    before = set(path.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        bundle_from_checkpoint(
            path, path.parent / "bundle", ExportOptions(input_kind="tensor"), hints=golden(name).hints
        )
    assert set(path.parent.iterdir()) == before
    assert str(path) in str(caught.value)
    return f"{caught.value} {caught.value.hint}".replace(str(path), "")


@pytest.mark.first(3)
@each_source
def test_a_missing_key(name: str, tmp_path: Path) -> None:
    for key in used_keys(name):
        message = refusal(name, damaged(name, tmp_path, lambda state, key=key: state.pop(key)))  # type: ignore[misc]
        layer = shown(key).rpartition(".")[0] or shown(key)
        assert layer in message or layer.split(".")[-1] in message, f"{key}: {message}"


def _with_another_dimension(tensor: Tensor) -> Tensor:
    return tensor[..., None]


def _twice_as_long(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


@pytest.mark.first(3)
@each_source
@pytest.mark.parametrize("change", [_with_another_dimension, _twice_as_long], ids=["dimension", "length"])
def test_a_tensor_of_another_shape(name: str, change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    for key in used_keys(name):
        path = damaged(name, tmp_path, lambda state, key=key: state.update({key: change(state[key])}))  # type: ignore[misc]
        message = refusal(name, path)
        # A longer weight can show a larger network, which the other tensors of the same layer do not fit.
        expected = shown(key) if change is _with_another_dimension else shown(key).removesuffix(".weight")
        assert expected in message, f"{key}: {message}"


@pytest.mark.first(3)
@each_source
def test_a_tensor_with_nan(name: str, tmp_path: Path) -> None:
    for key in used_keys(name):

        def change(state: State, key: str = key) -> None:
            state[key] = state[key].contiguous().clone()
            state[key].view(-1)[0] = torch.nan

        message = refusal(name, damaged(name, tmp_path, change))
        assert f"{shown(key)}: 1 of " in message
        assert "NaN" in message


@pytest.mark.first(3)
@each_source
def test_a_block_with_a_huge_number(name: str, tmp_path: Path) -> None:
    def change(state: State) -> None:
        key = next(key for key in state if re.search(r"(blocks|layers)\.\d+\.", key))
        state[re.sub(r"\.\d+\.", ".1000000000.", key, count=1)] = state[key]

    assert ".1000000000." in refusal(name, damaged(name, tmp_path, change))


@each_source
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file(name: str, share: float, tmp_path: Path) -> None:
    path = tmp_path / golden(name).path.name
    file = path
    if golden(name).path.is_dir():
        shutil.copytree(golden(name).path, path)
        file = path / WEIGHTS
    data = (golden(name).path / file.relative_to(path)).read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    refusal(name, path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepvit_cnn_scaled", "the preset deepvit_S of the family deepvit, but has no tensor patch_embed.proj.weight"),
        ("rmt_2023", r"the preset RMT_S of the family rmt, but has no tensor patch_embed.proj.0.weight"),
    ],
)
def test_a_file_that_names_a_preset_and_is_not_recognised(name: str, message: str, tmp_path: Path) -> None:
    """Without the tensor, the file is left to timm, which has no architecture of this name."""
    first = next(key for key in used_keys(name) + tuple(state_of(content_of(name))) if "patch_embed.proj" in key)
    assert message in refusal(name, damaged(name, tmp_path, lambda state: state.pop(first)))
