"""Sizes of the images and patches of a file whose patch embedding is a linear layer on flattened patches."""

from __future__ import annotations

from dataclasses import replace

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import asked_image, exact_root
from gmmvit_deploy.models.specs import CHANNELS


def image_of_patches(
    source: str, hints: LoadHints, *, name: str, values: int, grid: int | None
) -> tuple[int, int, int]:
    """Return (side of the images, channels of the images, side of a patch).

    source: the name of the file.  name: the name of the linear layer.
    values: of a patch of the image, c·p·p for c channels and patches of p × p pixels.
    grid: the number of patches along a side of the image, or None for a file without position embeddings.
    The caller compares the side of the images with ``--image-size``.
    Errors: CheckpointError when the user must give the channels or the size, or gives one that does not fit ``values``.
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
