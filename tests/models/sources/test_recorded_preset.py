"""The preset that a file names is used only if its sizes are those of the tensors."""

from __future__ import annotations

from typing import Any

import pytest

from gmmvit_deploy.models.families.vit.presets import PRESETS
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.sources.record import TrainingRecord
from gmmvit_deploy.models.sources.recorded_preset import RecordedPreset, recorded_preset
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.specs import MaskSpec

(NAME, BUILD), *_ = PRESETS.items()
SPEC = BUILD(10, 32, MaskSpec())


def preset_of(differing: tuple[str, ...] = (), **record: Any) -> tuple[RecordedPreset[ViTSpec] | None, str]:
    return recorded_preset(
        Shapes({}, "file.pth", record=TrainingRecord(**record)),
        preset_named=lambda name: SPEC if name == NAME else None,
        differences=lambda spec: differing if spec is SPEC else ("another spec",),
    )


@pytest.mark.parametrize(
    ("entry", "record"),
    [
        ("args.model", {"args": {"model": NAME}}),
        ("arch", {"entries": {"arch": NAME}}),
        ("arch", {"args": {"model": NAME}, "entries": {"arch": NAME}}),
    ],
)
def test_a_preset_of_the_same_sizes_is_used(entry: str, record: dict[str, Any]) -> None:
    preset, reason = preset_of(**record)
    assert preset == RecordedPreset(name=NAME, spec=SPEC, origin=f"the preset {NAME}, which {entry} of the file names")
    assert reason == ""


@pytest.mark.parametrize(
    ("differing", "record", "reason"),
    [
        ((), {}, ""),
        ((), {"args": {"model": [NAME]}, "entries": {"arch": ""}}, ""),
        ((), {"args": {"model": "net"}}, "; args.model of the file names net, which is not a preset of this family"),
        (
            (),
            {"args": {"model": NAME}, "entries": {"arch": "net"}},
            f"; arch names net and args.model names {NAME}, so no preset is used",
        ),
        (
            ("heads 4 (the preset has 8)", "depth 2 (the preset has 9)"),
            {"args": {"model": NAME}},
            f"; args.model names the preset {NAME}, but the file differs from it: heads 4 (the preset has 8), "
            "depth 2 (the preset has 9)",
        ),
    ],
    ids=["no record", "no name", "no preset", "two names", "other sizes"],
)
def test_any_other_record_is_not_used(differing: tuple[str, ...], record: dict[str, Any], reason: str) -> None:
    assert preset_of(differing, **record) == (None, reason)
