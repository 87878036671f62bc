"""Read a model folder, as the Hugging Face hub stores it: of timm (``save_for_hf``) or of transformers.

model.safetensors or pytorch_model.bin      the weights; of transformers, also in several files (`hugging_face_folder`)
config.json                                 timm: architecture, model_args, pretrained_cfg, label_names
                                            transformers: architectures, model_type, id2label
preprocessor_config.json                    transformers: the preprocessing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gmmvit_deploy.checkpoints.hugging_face_folder import INDEX_FILES, read_parts
from gmmvit_deploy.checkpoints.json_files import json_object
from gmmvit_deploy.checkpoints.reading import TensorFile, read_tensors
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.hugging_face.checkpoint import CONFIG_FILE
from gmmvit_deploy.models.families.hugging_face.images import PREPROCESSOR_FILE

__all__ = ["read_checkpoint"]

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_OF_TRANSFORMERS = ("architectures", "model_type")
_HINT = (
    "copy or download config.json again; without config.json, give the file of the weights, and type --model and "
    "--model-args"
)


def read_checkpoint(path: Path, weights: str | None = None) -> TensorFile:
    """Read a checkpoint file (`read_tensors`), or a model folder of timm or of transformers.

    Errors: CheckpointError as in `read_tensors` and `hugging_face_folder.read_parts`, and when the folder has no
    weights or no valid ``config.json``.
    """
    if not path.is_dir():
        return read_tensors(path, weights)
    present = [path / name for name in (*_WEIGHTS, *INDEX_FILES) if (path / name).is_file()]
    if not present or not (path / CONFIG_FILE).is_file():
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "no file"
        raise CheckpointError(
            f"{path}: expected a checkpoint file, or a model folder of timm or of Hugging Face transformers with "
            f"{CONFIG_FILE} and {_WEIGHTS[0]} or {_WEIGHTS[1]}; the folder holds {held}",
            hint=f"copy the missing file into the folder; without {CONFIG_FILE}, give the file of the weights, and "
            "type --model and --model-args",
        )
    config = json_object(path / CONFIG_FILE, hint=_HINT)
    of_transformers = "architecture" not in config and any(key in config for key in _OF_TRANSFORMERS)
    if not of_transformers:
        _check_timm(path / CONFIG_FILE, config)
    file = read_parts(present[0], weights) if present[0].name in INDEX_FILES else read_tensors(present[0], weights)
    writer = "Hugging Face transformers" if of_transformers else "timm"
    return replace(
        file,
        wrapping=f"model folder of {writer}, {file.wrapping}",
        record=replace(
            file.record,
            config=config,
            of_transformers=of_transformers,
            preprocessor=_preprocessor(path / PREPROCESSOR_FILE) if of_transformers else None,
        ),
    )


def _preprocessor(path: Path) -> Mapping[str, Any] | None:
    hint = f"copy or download {path.name} again"
    return json_object(path, hint=hint) if path.is_file() else None


def _check_timm(path: Path, config: Mapping[str, Any]) -> None:
    """Errors: CheckpointError when the configuration of a model folder of timm is not valid."""
    if not isinstance(config.get("architecture"), str) or not config["architecture"]:
        raise CheckpointError(
            f"{path}: expected a JSON object with the name of the architecture under 'architecture' (timm) or "
            "'architectures' (Hugging Face transformers)",
            hint=_HINT,
        )
    for key in ("model_args", "pretrained_cfg"):
        if not isinstance(config.get(key), dict | None):
            raise CheckpointError(
                f"{path}: expected an object under '{key}', got {type(config[key]).__name__}", hint=_HINT
            )
