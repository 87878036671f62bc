"""Infer a spec from the names and shapes of tensors: functions shared by all families.

The number of heads follows only from certain tensors, such as per-head masks, position bias tables and head mixing
matrices. Without such a tensor, the user must give it: a model with a wrong number of heads loads without an error and
computes wrong predictions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import LoadHints, Pool
from gmmvit_deploy.models.sources.record import TrainingRecord
from gmmvit_deploy.models.specs import CHANNELS, MaskSpec, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

_RELEASED_CHANNELS = 3
_CONFIGURED_SIZES = (32, 64)  # the image sizes for which the paper authors' released code has a patch size


class MissingTensorError(CheckpointError):
    """The file lacks tensors of the architecture.  names: the names that the tensors have in a file."""

    def __init__(self, message: str, *, names: tuple[str, ...], hint: str) -> None:
        super().__init__(message, hint=hint)
        self.names = names


class Shapes:
    """The shapes of a file's tensors by name; CheckpointError states the shape that a method expected.

    A size that one tensor shows is taken from it alone: the later comparison of all tensors with the network
    (`checkpoints.weights.misfits`) says which other tensors do not fit.

    source: the name of the file, for messages.  channels: the number of image channels that the user gave, or None.
    taken_from: field of the spec that no tensor shows and no option states → where its value comes from, such as
    ``the preset RMT_S, which args.model of the file names``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source: str,
        *,
        channels: int | None = None,
        record: TrainingRecord | None = None,
    ) -> None:
        self.tensors = tensors
        self.source = source
        self.record = record or TrainingRecord()
        self._channels = channels
        self.taken_from: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def of(self, name: str, *, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor.  Errors: CheckpointError when it is absent, empty, or of another rank."""
        if name not in self.tensors:
            raise MissingTensorError(
                f"{self.source}: tensor {name} is missing; its shape determines the size of the model",
                names=(name,),
                hint="if timm builds the model, type --model with timm's name of the architecture; for a class of "
                "yours, type --model FILE.py:CLASS; else use the complete file that the training code saved",
            )
        shape = tuple(self.tensors[name].shape)
        if len(shape) != rank or 0 in shape:
            raise CheckpointError(
                f"{self.source}: {name} has shape {shape}; expected {rank} dimensions, each at least 1"
            )
        return shape

    def count(self, pattern: str) -> int:
        """Return the number of layers, blocks or heads that the names count from 0, such as 9 for ``blocks.8.norm``.

        pattern: a regular expression that matches the start of a name, whose first group is the number in the name.
        """
        matches = [match for match in map(re.compile(pattern).match, self.tensors) if match]
        last = max(matches, key=lambda match: int(match.group(1)), default=None)
        count = 0 if last is None else int(last.group(1)) + 1
        if last is not None and count > len(self.tensors):
            raise CheckpointError(
                f"{self.source}: the name {last.string} counts {count} layers, but the file has only "
                f"{len(self.tensors)} tensors"
            )
        return count

    def grid(self, positions: int, *, where: str) -> int:
        """Return the side of the square grid with this number of positions.  where: the tensor, for the error."""
        side = exact_root(positions)
        if side is None:
            raise CheckpointError(f"{self.source}: {where} has {positions} positions; expected a square grid")
        return side

    def linear_patch(self, name: str, *, views: int = 1) -> tuple[int, int, int]:
        """Return (D, p, c) for a linear patch embedding whose weight has the shape (D, views·c·p·p).

        The shape gives only the product c·p·p. If the user gives no channels, c is 3, as in the paper authors' code.
        views: 5 with shifted patch tokenisation, whose patches hold the image and four copies.
        """
        dim, values = self.of(name, rank=2)
        channels = self._channels or _RELEASED_CHANNELS
        side = exact_root(values / (views * channels))
        if side is None:
            possible = [c for c in CHANNELS if exact_root(values / (views * c)) is not None]
            given = f"--set channels={channels}" if self._channels else f"images of {channels} channels"
            product = f"{channels}·p·p" if views == 1 else f"{views}·{channels}·p·p"
            raise CheckpointError(
                f"{self.source}: {name} takes {values} values per patch; expected {product} for {given} and "
                "square patches of p × p pixels",
                hint=f"type {' or '.join(f'--set channels={c}' for c in possible)}, which fits the file"
                if possible
                else "use another file: no supported number of channels makes these patches square",
            )
        return dim, side, channels

    def convolution_patch(self, name: str) -> tuple[int, int, int]:
        """Return (D, p, c) for a patch convolution whose weight has the shape (D, c, p, p)."""
        dim, channels, side, _ = self.of(name, rank=4)
        return dim, side, channels


def exact_root(value: float) -> int | None:
    """Return the square root of ``value`` if the root is a whole number of at least 1, else None."""
    if value < 1 or value != int(value):
        return None
    root = math.isqrt(int(value))
    return root if root * root == value else None


MAX_SIDE = 2**14  # pixels; an image of this side has more pixels than the preprocessing takes


def image_sides(value: Any) -> tuple[int, int] | None:
    """Return (height, width) of a side or of two sides in pixels, or None if the value is no size up to `MAX_SIDE`."""
    sides = list(value) if isinstance(value, list | tuple) else [value, value]
    whole = all(isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= MAX_SIDE for side in sides)
    return (sides[0], sides[1]) if whole and len(sides) == 2 else None


def refuse_depth(shapes: Shapes, depths: Mapping[str, Any], *, where: str, hint: str) -> None:
    """Refuse a network with more layers than the file has tensors, which another package would build for minutes.

    depths: name of a setting → its value, a number of layers or a list of such numbers.
    """
    for name, value in depths.items():
        counts = [count for count in (value if isinstance(value, list | tuple) else [value]) if isinstance(count, int)]
        if sum(counts) > len(shapes.tensors):
            raise CheckpointError(
                f"{where}: {name} is {value!r}, more layers than the weights have tensors ({len(shapes.tensors)})",
                hint=hint,
            )


def infer_mask(shapes: Shapes, hints: LoadHints, *prefixes: str) -> MaskSpec:
    """Return the mask of attentions; a mixture is shared if each mask is for a single head (`MaskSpec.for_heads`).

    prefixes: of the names of the mask's tensors in each attention, without the last dot.
    """
    source, prefix = shapes.source, prefixes[0]
    parts = {part for part in ("alpha", "sigma", "mask") if f"{prefix}.{part}" in shapes}
    if not parts & {"alpha", "sigma"}:
        if hints.closed_form:
            raise CheckpointError(
                f"{source}: --set closed_form=yes was given, but the file holds no alpha and sigma",
                hint="leave --set closed_form out",
            )
        return MaskSpec(kind="elm" if parts else "plain")
    if missing := {"alpha", "sigma"} - parts:
        raise CheckpointError(f"{source}: {prefix}.{missing.pop()} is missing")
    if "mask" not in parts and not hints.closed_form:
        raise CheckpointError(
            f"{source}: {prefix}.mask, the stored base mask, is missing",
            hint="if the model was trained with the paper's closed formula, type --set closed_form=yes",
        )
    kernels = shapes.of(f"{prefix}.alpha", rank=4)[0]
    shared = set(mask_heads(shapes, prefixes)) == {1}
    return MaskSpec(kind="gmm", kernels=kernels, shared=shared, closed_form=bool(hints.closed_form))


def mask_heads(shapes: Shapes, prefixes: Sequence[str]) -> list[int]:
    """Return the number of heads in the mask of each attention: 1 for a shared, single-head or missing mask."""
    alphas = [f"{prefix}.alpha" for prefix in prefixes]
    return [shapes.of(alpha, rank=4)[1] if alpha in shapes else 1 for alpha in alphas]


def infer_heads(
    shapes: Shapes,
    hints: LoadHints,
    *,
    width: int,
    shown: tuple[int | None, str] = (None, ""),
    presets: Mapping[str, Callable[[int, int, MaskSpec], ModelSpec]] | None = None,
) -> int:
    """Return the number of heads of the first attention from the file, else from ``hints``, else from the preset.

    width: the width of q, which is the number of heads times the head dim.
    shown: the number of heads that the tensors show, or None; and a clause such as "the number of heads in the masks of
    the file is", which a message continues with the number.
    presets: the presets of the family; None for files whose number of heads is that of no preset.
    """
    source, hinted, (known, evidence) = shapes.source, hints.heads, shown
    of_preset = None
    if presets is not None and hints.preset is not None:
        of_preset = presets[hints.preset](1, 224, MaskSpec()).first_heads
    if hinted is not None and of_preset is not None and hinted != of_preset:
        raise CheckpointError(
            f"{source}: --set heads={hinted}, but the preset has {of_preset}",
            hint=f"omit --set heads to take the {of_preset} heads of the preset, or omit --preset {hints.preset}",
        )
    if known is not None and hinted is not None and hinted != known:
        raise CheckpointError(
            f"{source}: --set heads={hinted}, but {evidence} {known}",
            hint=f"omit --set heads, or type --set heads={known}",
        )
    heads = known or hinted or of_preset
    if not known and not hinted and of_preset:
        shapes.taken_from["heads"] = f"--preset {hints.preset}"
    if heads is None:
        raise CheckpointError(
            f"{source}: this file does not determine the number of attention heads",
            hint=f"type --set heads=N{'' if presets is None else ' or --preset NAME'} with the number of heads of "
            "the training; a wrong number raises no error, but the predictions are wrong. "
            f"N must divide {width}, the width of q, k and v: {_divisors(width)}",
        )
    if width % heads:
        other_preset = "" if hints.preset is None else f"omit --preset {hints.preset}, and "
        raise CheckpointError(
            f"{source}: the width of q, k and v ({width}) is not a multiple of {heads} heads",
            hint=f"{other_preset}type --set heads=N with the number of heads that the model was trained with: one of "
            f"{_divisors(width)}",
        )
    return heads


def _divisors(width: int) -> list[int]:
    return [n for n in range(1, 65) if width % n == 0]


def check_image_hints(source: str, hints: LoadHints, *, image_size: int, channels: int, evidence: str) -> None:
    """Check that the user's image size and channels match those of the file.

    evidence: a clause such as "its tensors show", which the message continues with the value of the file.
    """
    for option, given, own in (
        ("--image-size ", hints.image_size, image_size),
        ("--set channels=", hints.channels, channels),
    ):
        if given is not None and given != own:
            raise CheckpointError(
                f"{source}: {option}{given} contradicts the file: {evidence} {own}",
                hint=f"omit {option.rstrip(' =')}, or type {option}{own}",
            )


def asked_image(source: str, hints: LoadHints, *, example: str = "--image-size 28 --set channels=1") -> tuple[int, int]:
    """Return the user's image size and channels, for a file whose tensors show neither.

    example: the options in the hint of the error, which names the missing options.
    """
    if hints.image_size is not None and hints.channels is not None:
        return hints.image_size, hints.channels
    asked = {"--image-size N": ("the size", hints.image_size), "--set channels=N": ("the channels", hints.channels)}
    missing = {option: word for option, (word, value) in asked.items() if value is None}
    raise CheckpointError(
        f"{source}: no tensor of this file shows {' and '.join(missing.values())} of the images",
        hint=f"type {' and '.join(missing)} with the values of the training; for example, {example}",
    )


def preset_differences(spec: ModelSpec, preset: ModelSpec) -> list[str]:
    """Return a text for each field in which the specs differ, such as ``heads 4 (the preset has 8)``.

    Variants are not compared, and the patch size only for image sizes that the paper authors' released code knows.
    """
    left_out = {"image_size", "channels", "classes", "mask", "class_token", "spt", "lsa"}
    if spec.image_size not in _CONFIGURED_SIZES:
        left_out.add("patch_size")
    return field_differences(spec, preset, left_out=left_out)


def field_differences(spec: ModelSpec, preset: ModelSpec, *, left_out: Collection[str]) -> list[str]:
    """Return a text for each field that is not left out and in which the specs differ."""
    return [
        f"{field} {getattr(spec, field)} (the preset has {getattr(preset, field)})"
        for field in type(spec).__dataclass_fields__
        if field not in left_out and getattr(spec, field) != getattr(preset, field)
    ]


def image_of_patches(
    source: str, hints: LoadHints, *, name: str, values: int, grid: int | None
) -> tuple[int, int, int]:
    """Return (side of the images, channels, side of a patch) for a linear patch embedding on flattened patches.

    source: the name of the file.  name: the name of the linear layer.
    values: of a patch of the image, c·p·p for c channels and patches of p × p pixels.
    grid: the number of patches along a side of the image, or None for a file without position embeddings.
    The caller compares the side of the images with ``--image-size``.
    """
    sides = {c: side for c in CHANNELS if (side := exact_root(values / c)) is not None and hints.channels in (None, c)}
    if len(sides) > 1 and hints.image_size is not None:
        sides = {
            c: side
            for c, side in sides.items()
            if hints.image_size % side == 0 and grid in (None, hints.image_size // side)
        } or sides
    if not sides:
        possible = [c for c in CHANNELS if exact_root(values / c) is not None]
        fitting = " or ".join(f"--set channels={c}" for c in possible)
        expected = f"{hints.channels}·p·p" if hints.channels else "c·p·p for 1 to 4 channels"
        raise CheckpointError(
            f"{source}: {name}.weight takes {values} values of a patch of the image; expected {expected} and patches "
            "of p × p pixels",
            hint=f"omit --set channels, or type {fitting}, which fits the file"
            if possible
            else "use another file: no supported number of channels makes these patches square",
        )
    known_channels = next(iter(sides)) if len(sides) == 1 else None
    known_size = hints.image_size if grid is None else grid  # a stored grid shows the side once the channels are known
    options = {"--image-size 224": known_size, "--set channels=3": known_channels}
    image_size, channels = asked_image(
        source,
        replace(hints, image_size=known_size, channels=known_channels),
        example=" ".join(option for option, value in options.items() if value is None),
    )
    patch_size = sides[channels]
    if grid is not None:
        return grid * patch_size, channels, patch_size
    if image_size % patch_size:
        raise CheckpointError(
            f"{source}: --image-size {image_size}, but the tensors of the file show patches of {patch_size} × "
            f"{patch_size} pixels, which do not tile such images",
            hint="type the --image-size that the model was trained with",
        )
    return image_size, channels, patch_size


def asked_pool(source: str, hints: LoadHints) -> Pool:
    """Return the user's ``--set pool``, for a file whose tensors do not show what the classifier reads."""
    if hints.pool is None or hints.pool == "pooler":
        raise CheckpointError(
            f"{source}: no tensor of this file shows what the classifier reads: the class token or the mean of all "
            "tokens",
            hint="type --set pool=cls or --set pool=mean, as in training; the wrong value raises no error, but the "
            "predictions are wrong",
        )
    return hints.pool


def known_pool(source: str, hints: LoadHints, *, pool: Pool, evidence: str) -> Pool:
    """Return the pooling that the file shows, unless the user's ``--set pool`` differs.

    evidence: a clause such as "the file has no class token, so the pooling is".
    """
    if hints.pool not in (None, pool):
        raise CheckpointError(
            f"{source}: --set pool={hints.pool}, but {evidence} {pool}",
            hint=f"leave --set pool out, or type --set pool={pool}",
        )
    return pool


SpecT = TypeVar("SpecT", bound=ModelSpec)


def recorded_preset(
    shapes: Shapes,
    *,
    preset_named: Callable[[str], SpecT | None],
    differences: Callable[[SpecT], Sequence[str]],
) -> tuple[SpecT | None, str]:
    """Return the preset that the entries ``arch`` and ``args.model`` of the file name, and where its name comes from,
    such as ``the preset RMT_S, which args.model of the file names``; or None, and why there is no preset.

    A wrong preset raises no error, but gives other logits: it is used only if its sizes are those of the tensors.
    preset_named: name of an architecture in the training code → the spec of the preset, or None.
    differences: the spec of a preset → a text for each size in which the tensors differ from it.
    The reason continues a message after a clause; it is empty if the file names none.
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
    return preset, f"the preset {name}, which {entry} of the file names"
