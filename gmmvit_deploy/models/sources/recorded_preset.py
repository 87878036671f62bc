"""The preset that a training script stored in its file, for values of the network that no tensor shows.

A wrong value raises no error, but gives other logits. The preset is therefore used only if its sizes are those of the
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.specs import ModelSpec

SpecT = TypeVar("SpecT", bound=ModelSpec)


@dataclass(frozen=True, kw_only=True)
class RecordedPreset(Generic[SpecT]):
    """A preset that a file names.

    name: the name in the file.  spec: the spec of the preset.
    origin: where values of the preset come from, such as ``the preset RMT_S, which args.model of the file names``.
    """

    name: str
    spec: SpecT
    origin: str


def recorded_preset(
    shapes: Shapes,
    *,
    preset_named: Callable[[str], SpecT | None],
    differences: Callable[[SpecT], Sequence[str]],
) -> tuple[RecordedPreset[SpecT] | None, str]:
    """Return the preset that the entries ``arch`` and ``args.model`` of the file name, and why there is no preset.

    preset_named: name of an architecture in the training code → the spec of the preset, or None.
    differences: the spec of a preset → a text for each size in which the tensors differ from it.
    The second value continues a message after a clause; it is empty if the preset is used, and if the file names none.
    """
    entries = {"arch": shapes.record.entries.get("arch"), "args.model": shapes.record.args.get("model")}
    named = {entry: name for entry, name in entries.items() if isinstance(name, str) and name}
    if not named:
        return None, ""
    if len(set(named.values())) > 1:
        names = " and ".join(f"{entry} names {name}" for entry, name in named.items())
        return None, f"; {names}, so no preset is used"
    (entry, name), *_ = named.items()
    preset = preset_named(name)
    if preset is None:
        return None, f"; {entry} of the file names {name}, which is not a preset of this family"
    if differing := differences(preset):
        return None, f"; {entry} names the preset {name}, but the file differs from it: {', '.join(differing)}"
    return RecordedPreset(name=name, spec=preset, origin=f"the preset {name}, which {entry} of the file names"), ""
