"""Labelled images from any storage, decoded singly and on demand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.images import ImageSpec, image_from_pixels
from gmmvit_deploy.preprocess import MODES, UnusableImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ArrayImages", "FileImages", "Images"]


class Images:
    """Abstract: labelled images, addressed by index; ``len(images)`` is their number.

    name: of the data set.  classes: class names by index; empty if the data names no classes.
    An image that cannot be decoded raises ImageError; callers decide whether to skip it.
    """

    name: str
    classes: tuple[str, ...]

    def __len__(self) -> int:
        raise NotImplementedError

    def pixels(self, index: int, image: ImageSpec) -> NDArray[Any]:
        """Return uint8 (height, width, channels), converted and resized as on a server.

        Errors: ImageError on a broken file.
        """
        raise NotImplementedError

    def encoded(self, index: int) -> bytes:
        """Return the image as a client would send it: the file's bytes, or a PNG of the array.

        Errors: ImageError when the file cannot be read.
        """
        raise NotImplementedError

    def label(self, index: int) -> int | None:
        """Return the index of the true class, or None if the image has no label."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Return a text that identifies the image: a path, or ``test_batch[17]``."""
        raise NotImplementedError


class ArrayImages(Images):
    """Images of equal size in an array: uint8 (N, h, w) in grey, or (N, h, w, channels) with 1 to 4 channels."""

    def __init__(
        self,
        name: str,
        images: NDArray[Any],
        labels: Sequence[int] | NDArray[Any] | None,
        classes: tuple[str, ...] = (),
    ) -> None:
        """Errors: InputError when the array does not hold images, or the labels do not fit it."""
        import numpy as np

        shape = images.shape
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and shape[3] not in MODES):
            raise InputError(f"{name}: expected uint8 (N, h, w) or (N, h, w, 1..4), got {images.dtype} {shape}")
        if not len(images):
            raise InputError(f"{name}: it holds no image")
        self._labels = None if labels is None else np.asarray(labels).reshape(-1)
        if self._labels is not None and (len(self._labels) != len(images) or self._labels.dtype.kind not in "iu"):
            raise InputError(
                f"{name}: expected {len(images)} whole numbers as labels, "
                f"got {len(self._labels)} of {self._labels.dtype}"
            )
        self.name, self.classes = name, classes
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def pixels(self, index: int, image: ImageSpec) -> NDArray[Any]:
        return image.pixels_from_image(image_from_pixels(self._images[index]))

    def encoded(self, index: int) -> bytes:
        file = io.BytesIO()
        image_from_pixels(self._images[index]).save(file, "PNG")
        return file.getvalue()

    def label(self, index: int) -> int | None:
        return None if self._labels is None else int(self._labels[index])

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"


class FileImages(Images):
    """Encoded images, each in its own file."""

    def __init__(
        self, name: str, files: Sequence[Path], labels: Sequence[int] | None, classes: tuple[str, ...] = ()
    ) -> None:
        """Errors: InputError when ``files`` is empty."""
        if not files:
            raise InputError(f"{name}: it holds no image")
        self.name, self.classes = name, classes
        self._files, self._labels = list(files), labels

    def __len__(self) -> int:
        return len(self._files)

    def pixels(self, index: int, image: ImageSpec) -> NDArray[Any]:
        try:
            return image.pixels_from_bytes(self.encoded(index))
        except UnusableImage as exc:
            raise ImageError(f"{self._files[index]}: {exc}") from exc

    def encoded(self, index: int) -> bytes:
        try:
            return self._files[index].read_bytes()
        except OSError as exc:
            raise ImageError(f"{self._files[index]}: it cannot be read: {exc.strerror or exc}") from exc

    def label(self, index: int) -> int | None:
        return None if self._labels is None else self._labels[index]

    def where(self, index: int) -> str:
        return str(self._files[index])
