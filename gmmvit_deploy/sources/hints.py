"""Values that the user gives because a checkpoint file may not contain them."""

from __future__ import annotations

from dataclasses import dataclass

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.specs import CHANNELS

__all__ = ["LoadHints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHints:
    """Values from the command line's options; None for an option that is not given.

    heads: the number of attention heads, in the first stage.  preset: a name of `families.PRESETS`.
    image_size: the side of the images in pixels.  channels: the number of channels of the images.
    closed_form: True if the mask was trained with the paper's formula from distances, not with the stored base mask of
    the released code. Without this value the file must contain a stored base mask.
    Errors: InputError when a value is out of range.
    """

    heads: int | None = None
    preset: str | None = None
    closed_form: bool | None = None
    image_size: int | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise InputError(f"--image-size: expected at least 1, got {self.image_size}")
        if self.channels is not None and self.channels not in CHANNELS:
            raise InputError(f"--channels: expected one of {', '.join(map(str, CHANNELS))}, got {self.channels}")
        if self.heads is not None and self.heads < 1:
            raise InputError(f"--heads: expected at least 1, got {self.heads}")
