"""Values from the user that a checkpoint file does not contain."""

from __future__ import annotations

from dataclasses import dataclass

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.specs import CHANNELS

__all__ = ["LoadHints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHints:
    """heads: H.  preset: a name of `families.PRESETS`.  image_size: S, in pixels.  channels: of the images.

    closed_form: the mask was trained with the paper's formula from distances, not with the stored base of the released
    code. None: not given, so the file must contain a stored base.
    Errors: InputError when a value is out of range.
    """

    heads: int | None = None
    preset: str | None = None
    closed_form: bool | None = None
    image_size: int | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise InputError(f"--image-size is {self.image_size}; expected at least 1")
        if self.channels is not None and self.channels not in CHANNELS:
            raise InputError(f"--channels is {self.channels}; expected one of {', '.join(map(str, CHANNELS))}")
        if self.heads is not None and self.heads < 1:
            raise InputError(f"--heads: expected at least 1, got {self.heads}")
