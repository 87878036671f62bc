"""RMT: golden logits in float64, what no tensor shows, presets, releases, and mistakes made in reading a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.errors import CheckpointError, InputError, SpecError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.rmt import PRESETS, RMTSpec, infer_spec, tensor_origins
from gmmvit_deploy.models.families.rmt.model import FoldedRotation
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import RecordedOptions, TrainingRecord
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.specs import MaskSpec
from tests.conftest import golden
from tests.golden_files import content_of

State = dict[str, Tensor]


def loaded(name: str, **changes: Any) -> LoadedCheckpoint:
    case = golden(name)
    return load_checkpoint(case.path, replace(case.hints, **changes))


# ---- what no tensor shows ------------------------------------------------------------------------------------------


def file_of(spec: RMTSpec) -> State:
    """Return the tensors of a file of this spec, without data."""
    with torch.device("meta"):
        state = model_from_spec(spec).state_dict()
    tensors: State = {}
    for ours, origin in tensor_origins(spec, state).items():
        if isinstance(origin, str):
            tensors[origin] = state[ours]
        elif len(origin.keys) == 1:
            tensors[origin.keys[0]] = state[ours].reshape(1, 1, 1, -1)
        else:
            tensors |= dict(zip(origin.keys, state[ours].chunk(3), strict=True))
    for stage, (dim, heads) in enumerate(zip(spec.dims, spec.heads, strict=True)):
        tensors[f"layers.{stage}.Relpos.angle"] = torch.empty(dim // heads, device="meta")
    return tensors


def named(spec: RMTSpec, **args: Any) -> Shapes:
    return Shapes(file_of(spec), "file.pth", record=TrainingRecord(args=RecordedOptions(args)))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("preset", "name"),
    [("RMT_T3", "RMT_T3"), ("RMT_M2", "RMT_B"), ("RMT_S_2023", "RMT_S"), ("RMT_L6_token_label", "RMT_L6")],
)
def test_the_preset_of_the_record_is_taken_if_all_sizes_agree(preset: str, name: str) -> None:
    spec = PRESETS[preset](1000, 224, MaskSpec())
    shapes = named(spec, model=name, input_size=224)
    assert infer_spec(shapes, LoadHints()) == spec
    where = f"the preset {name}, which args.model of the file names"
    assert shapes.taken_from == {"image_size": where, "decomposed_stages": where}
    shapes = named(spec, model=name, input_size=224)
    assert infer_spec(shapes, LoadHints(image_size=192)).image_size == 192
    assert shapes.taken_from == {"decomposed_stages": where}
    other = infer_spec(shapes, LoadHints(image_size=192, decomposed_stages=(2, 1)))
    assert (other.image_size, other.decomposed_stages) == (192, (1, 2))


def test_the_preset_of_the_record_is_not_taken_for_another_training_size() -> None:
    spec = PRESETS["RMT_T3"](1000, 224, MaskSpec())
    with pytest.raises(CheckpointError, match=r"side of the images; args\.input_size is 384"):
        infer_spec(named(spec, model="RMT_T3", input_size=384), LoadHints())


def test_a_typed_preset_gives_side_and_stages() -> None:
    spec, hints = PRESETS["RMT_S"](1000, 224, MaskSpec()), LoadHints(preset="RMT_S")
    shapes = named(spec)
    assert infer_spec(shapes, hints) == spec
    assert set(shapes.taken_from.values()) == {"--preset RMT_S"}


# ---- image sizes ---------------------------------------------------------------------------------------------------


def test_image_sizes_whose_constants_would_fill_the_memory_are_refused() -> None:
    spec = PRESETS["RMT_S"](1000, 224, MaskSpec())
    assert replace(spec, image_size=1536).constant_bytes <= 2 << 30
    with pytest.raises(SpecError, match=r"images of 2048×2048 pixels take .* GiB; expected at most 2 GiB"):
        replace(spec, image_size=2048)


def test_constant_bytes_are_those_of_the_folded_model() -> None:
    folded = fold(loaded("rmt_tiny_like").model)
    decays = sum(constant.constant.nbytes for constant in folded.biases)
    rotations = [module for module in folded.model.modules() if isinstance(module, FoldedRotation)]
    tables = sum(table.nbytes for module in rotations for table in (module.cos, module.sin))
    assert isinstance(folded.model.spec, RMTSpec)
    assert decays + tables == folded.model.spec.constant_bytes


# ---- files that are refused ----------------------------------------------------------------------------------------


BLOCK = "layers.1.blocks.0"
BAD: dict[str, tuple[Callable[[State], None], str]] = {
    "queries and keys of different widths": (
        lambda state: state.update(
            {f"{BLOCK}.retention.q_proj.bias": torch.zeros(11), f"{BLOCK}.retention.k_proj.bias": torch.zeros(13)}
        ),
        r"retention.q_proj.bias, .*retention.k_proj.bias.* of shape \(11,\), \(13,\), \(12,\) .*the same shape for Q",
    ),
    "2023 with a projection": (
        lambda state: [state.pop(key) for key in list(state) if "dwconv" in key] and None,
        "mixes the networks of different releases",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_damaged_file_is_refused_and_nothing_is_written(
    change: Callable[[State], None], message: str, tmp_path: Path
) -> None:
    held, hints = content_of("rmt_tiny_like"), golden("rmt_tiny_like").hints
    change(held["model"])
    path = tmp_path / "damaged.pth"
    torch.save(held, path)
    with pytest.raises(CheckpointError, match=message) as raised:
        bundle_from_checkpoint(path, tmp_path / "bundle", ExportOptions(input_kind="tensor"), hints=hints)
    assert str(path) in str(raised.value)
    assert not (tmp_path / "bundle").exists()


def test_a_decay_that_does_not_decrease_is_a_warning(tmp_path: Path) -> None:
    held = content_of("rmt_2023")
    held["model"]["layers.1.Relpos.decay"][1] *= -1
    torch.save(held, tmp_path / "grows.pth")
    findings = load_checkpoint(tmp_path / "grows.pth", golden("rmt_2023").hints).findings
    where = "stages.1.blocks.0.attention"
    assert {finding.where for finding in findings} == {f"{where}.rows head 1", f"{where}.columns head 1"}
    assert all("expected a decay below 0" in finding.what for finding in findings)
    assert not loaded("rmt_2023").findings


# ---- preprocessing -------------------------------------------------------------------------------------------------


def test_mean_and_std_are_taken_from_the_arguments_or_asked_for(tmp_path: Path) -> None:
    case = golden("rmt_2023")
    assert loaded("rmt_2023").images.mean is None
    with pytest.raises(InputError, match="the checkpoint does not state the mean and the std"):
        bundle_from_checkpoint(case.path, tmp_path / "bundle", ExportOptions(), hints=case.hints)
    held = content_of("rmt_2023")
    held["args"] = Namespace(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    torch.save(held, tmp_path / "args.pth")
    images = load_checkpoint(tmp_path / "args.pth", case.hints).images
    assert images.mean == (0.485, 0.456, 0.406)
    assert images.std == (0.229, 0.224, 0.225)


def test_counters_and_the_angles_of_2023_are_listed_as_unused() -> None:
    unused = loaded("rmt_2023").unused
    assert unused["layers.0.Relpos.angle"] == "angles that the release of 2023 stores and does not read"
    assert sum("num_batches_tracked" in key for key in unused) == 4 + 3 + 1
