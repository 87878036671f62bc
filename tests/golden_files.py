"""The golden files: checkpoints with inputs, and the logits that the code of their training gives for the inputs."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.tolerances import Noise, limit_from_noise, limit_from_stored
from tests.exact import exact_logits

GOLDEN = Path(__file__).parent / "golden"


def _manifests() -> Iterator[tuple[Path, dict[str, dict[str, Any]]]]:
    """(folder, manifest) of the golden files: the paper's released checkpoints first, then a folder for each family."""
    for path in (GOLDEN / "manifest.json", *sorted(GOLDEN.glob("*/manifest.json"))):
        yield path.parent, json.loads(path.read_text())


MANIFEST: dict[str, dict[str, Any]] = {}
"""Name of a golden checkpoint → its entry in the manifest, with the folder of its files.

family: of the model.  file: the checkpoint, NAME.pth by default.  inputs: images and logits, NAME.npz by default.
hints: arguments of `LoadHints`.
mask, trainable_parameters: what the checkpoint holds; a test requires both.
"""
for _folder, _entries in _manifests():
    for _name, _entry in _entries.items():
        if _name in MANIFEST:
            raise ValueError(f"{_folder / 'manifest.json'}: {_name} is the name of another golden checkpoint")
        MANIFEST[_name] = {**_entry, "folder": _folder}
NAMES = tuple(MANIFEST)
EACH_MASK = tuple({(entry["family"], entry["mask"]): name for name, entry in reversed(MANIFEST.items())}.values())[::-1]
"""The first golden checkpoint of each family and mask."""
_GMM_LAST = sorted(EACH_MASK, key=lambda name: MANIFEST[name]["mask"] == "gmm")
EACH_FAMILY = tuple({MANIFEST[name]["family"]: name for name in _GMM_LAST}.values())
"""A golden checkpoint of each family, with a Gaussian mixture mask if the family has them."""
_OTHER_MODULES = (
    *("eanet_transformer", "rmt_2023", "vp_simple_vit", "vp_spt_lsa", "sl_swin", "sl_cait", "sl_pit", "sl_t2t"),
    *("timm_swin", "timm_cait"),
)
EXPORTED = (
    *(name for name in EACH_MASK if MANIFEST[name]["mask"] != "elm" or MANIFEST[name]["family"] == "vit"),
    *_OTHER_MODULES,
)
"""The first golden checkpoint of each family and mask, ELM of ViT alone, and networks with other modules.  Only these
are exported by tests of each checkpoint: an export takes 5 to 20 seconds.  In PyTorch, every checkpoint is tested.
"""
RELEASED = tuple(name for name, entry in MANIFEST.items() if entry["folder"] == GOLDEN)
"""Checkpoints of the paper's released code; their manifest has more fields than the others."""
STRUCTURES = ("vit_gmm", "swin_gmm", "rmt_tiny_like")
"""Three networks of different structure: `make test` exports these, and `make test-rest` the others."""
LATER = tuple(name for name in NAMES if name not in RELEASED and MANIFEST[name]["family"] != "timm")
"""Checkpoints of other code, whose networks this package builds; timm builds those of tests/golden/timm."""


def each_export(names: Iterable[str]) -> list[Any]:
    """Return the names as cases of a test; those that are not in `STRUCTURES` are nightly."""
    return [pytest.param(name, marks=[] if name in STRUCTURES else [pytest.mark.nightly]) for name in names]


@dataclass(frozen=True)
class Golden:
    """A golden checkpoint, its inputs, and the logits that the code of its training gives."""

    name: str
    path: Path
    inputs: np.ndarray
    logits: np.ndarray
    hints: LoadHints

    @property
    def family(self) -> str:
        return str(MANIFEST[self.name]["family"])

    @property
    def exact(self) -> np.ndarray:
        """The float64 logits: of the training code where the file has them, else of the checkpoint in this package."""
        return _float64_logits(self.name)

    @property
    def noise(self) -> Noise:
        """The difference between float32 and float64 logits, both of the training code, or both of this package."""
        logits = self.logits if "logits64" in np.load(_arrays(self.name)) else _float32_logits(self.name)
        noise, scale = np.abs(logits - self.exact).max(), np.abs(self.exact).max()
        return Noise(largest=float(noise), rms=0.0, scale=float(scale))

    @property
    def atol(self) -> float:
        """Largest distance between the stored float32 logits and the float32 logits of another processor."""
        return limit_from_stored(self.noise).largest

    def limit(self, precision: Precision = "fp32", *, recorded: float | None = None) -> float:
        """Return parity's limit for the distance of a runner's logits from `exact`, on the images of this file.

        recorded: for int8, the largest difference of the graph that conversion recorded.
        """
        return limit_from_noise(self.noise, precision, recorded=recorded).largest


@functools.cache
def _float64_logits(name: str) -> np.ndarray:
    arrays = np.load(_arrays(name))
    if "logits64" in arrays:
        stored: np.ndarray = arrays["logits64"]
        return stored
    case = golden(name)
    return exact_logits(load_checkpoint(case.path, case.hints).model, case.inputs)


@functools.cache
def _float32_logits(name: str) -> np.ndarray:
    case = golden(name)
    with torch.inference_mode():
        logits: np.ndarray = load_checkpoint(case.path, case.hints).model(torch.from_numpy(case.inputs)).numpy()
    return logits


@functools.cache
def loaded(name: str) -> LoadedCheckpoint:
    """Return a golden checkpoint, the same object in every test of a process, which must not change it."""
    case = golden(name)
    return load_checkpoint(case.path, case.hints)


def trained(name: str) -> Model:
    """Return the network of a golden checkpoint, without gradients."""
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model.requires_grad_(False)


def _arrays(name: str) -> Path:
    """Return the path of the file with the images and logits."""
    path: Path = MANIFEST[name]["folder"] / MANIFEST[name].get("inputs", f"{name}.npz")
    return path


def golden(name: str) -> Golden:
    entry, arrays = MANIFEST[name], np.load(_arrays(name))
    return Golden(
        name=name,
        path=entry["folder"] / entry.get("file", f"{name}.pth"),
        inputs=arrays["input" if "input" in arrays else "images"],
        logits=arrays["logits"],
        hints=LoadHints(**_with_folder(entry["folder"], entry.get("hints", {}))),
    )


def _with_folder(folder: Path, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the hints with the path of the head file in the folder of the golden files."""
    return {**hints, "head": str(folder / hints["head"])} if "head" in hints else hints


STATES = ("state_dict", "model", "net", "model_state_dict", "teacher")
"""Names under which training scripts store the tensors."""


def content_of(name: str) -> dict[str, Any]:
    """Return the object that training saved in a golden file, read by PyTorch alone."""
    path = golden(name).path
    if path.is_dir():
        return dict(load_file(path / "model.safetensors"))
    with torch.serialization.safe_globals([Namespace]):
        content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def state_of(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the state dict in the content of a file."""
    state: dict[str, torch.Tensor] = next((content[key] for key in STATES if key in content), content)
    return state


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return dict(state_of(content_of(name)))
