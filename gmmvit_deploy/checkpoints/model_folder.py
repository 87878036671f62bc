"""Read a model folder of timm, as ``timm.models.save_for_hf`` writes it and the Hugging Face hub stores it.

model.safetensors or pytorch_model.bin      the weights
config.json                                 architecture, model_args, pretrained_cfg, label_names
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gmmvit_deploy.checkpoints.reading import TensorFile, read_tensors
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.sources.hints import WeightsKind

__all__ = ["read_checkpoint"]

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 2**24
_HINT = (
    "copy or download config.json again; without config.json, give the file of the weights, and type --model and "
    "--model-args"
)


def read_checkpoint(path: Path, weights: WeightsKind | None = None) -> TensorFile:
    """Read a checkpoint file (`read_tensors`), or a model folder of timm.

    Errors: CheckpointError as in `read_tensors`, and when the folder has no weights or no valid ``config.json``.
    """
    if not path.is_dir():
        return read_tensors(path, weights)
    present = [path / name for name in _WEIGHTS if (path / name).is_file()]
    if not present or not (path / _CONFIG).is_file():
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "no file"
        raise CheckpointError(
            f"{path}: expected a checkpoint file, or a model folder of timm with {_CONFIG} and {_WEIGHTS[0]} or "
            f"{_WEIGHTS[1]}; the folder holds {held}",
            hint=f"copy the missing file into the folder; without {_CONFIG}, give the file of the weights, and type "
            "--model and --model-args",
        )
    file = read_tensors(present[0], weights)
    return replace(
        file,
        wrapping=f"model folder of timm, {file.wrapping}",
        record=replace(file.record, config=_config(path / _CONFIG)),
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path}: the file has more than {_MAX_CONFIG_BYTES} bytes", hint=_HINT)
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: expected JSON: {exc}", hint=_HINT) from exc
    if not isinstance(data, dict) or not isinstance(data.get("architecture"), str) or not data["architecture"]:
        raise CheckpointError(
            f"{path}: expected a JSON object with the name of the architecture under 'architecture'", hint=_HINT
        )
    for key in ("model_args", "pretrained_cfg"):
        if not isinstance(data.get(key), dict | None):
            raise CheckpointError(
                f"{path}: expected an object under '{key}', got {type(data[key]).__name__}", hint=_HINT
            )
    return data
