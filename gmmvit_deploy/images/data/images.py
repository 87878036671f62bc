"""Labelled images in arrays or files.  An image is decoded only when a caller requests the image."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.images.data.files import LeftOutKind, left_out_text
from gmmvit_deploy.images.data.other_formats import as_served, pixels_of_file
from gmmvit_deploy.images.spec import ImageSpec, image_from_pixels
from gmmvit_deploy.inference.preprocess import MODES, UnusableImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

_T = TypeVar("_T")
Label = int | tuple[int, ...] | None
"""The index of the true class, the ascending indices of all true classes in multi-label data, or None."""


def evenly_spaced(count: int, limit: int) -> NDArray[Any]:
    """Return at most ``limit`` distinct indices below ``count``, ascending, at equal distances."""
    import numpy as np

    indices: NDArray[Any] = np.unique(np.linspace(0, count - 1, min(limit, count)).round().astype(int))
    return indices


class Images:
    """Abstract class: labelled images, addressed by index.

    classes: the names in the order of the class index, or empty.  left_out: the files beside the images.
    An image that cannot be decoded raises ImageError, so that the caller can skip the image.
    """

    name: str
    classes: tuple[str, ...]
    left_out: tuple[LeftOutKind, ...] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def pixels(self, index: int, image: ImageSpec) -> NDArray[Any]:
        """Return the image as uint8 (height, width, channels), resized as on a server.  Errors: ImageError."""
        raise NotImplementedError

    def encoded(self, index: int) -> bytes:
        """Return what a client sends to a server: the file, or a PNG of an array or of another format (`as_served`).

        Errors: ImageError when the file cannot be read, or is of another format and damaged or too large.
        """
        raise NotImplementedError

    def label(self, index: int) -> Label:
        """Return the true class or classes, or None if the image has no label."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Return a text that identifies the image in messages: the path, or a text such as ``cifar10 test[17]``."""
        raise NotImplementedError


class ArrayImages(Images):
    """Images in a uint8 array, (N, height, width) or (N, height, width, 1 to 4 channels)."""

    def __init__(
        self,
        name: str,
        images: NDArray[Any],
        labels: Sequence[int] | NDArray[Any] | None,
        classes: tuple[str, ...] = (),
    ) -> None:
        """Store the images.

        labels: the class index of each image, 0 and 1 for each class of each image, or None.
        Errors: InputError when ``images`` or ``labels`` have another shape or type.
        """
        import numpy as np

        shape = images.shape
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and shape[3] not in MODES):
            raise InputError(
                f"{name}: expected uint8 images (N, height, width) or (N, height, width, 1 to 4 channels), "
                f"got {images.dtype} {shape}"
            )
        if not len(images):
            raise InputError(f"{name}: expected at least one image, got an empty array")
        self._labels = None if labels is None else _labels_array(np.asarray(labels), name)
        if self._labels is not None and (len(self._labels) != len(images) or self._labels.dtype.kind not in "iu"):
            raise InputError(
                f"{name}: expected {len(images)} labels, all whole numbers, "
                f"got {len(self._labels)} labels of type {self._labels.dtype}"
            )
        self.name, self.classes = name, classes
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def pixels(self, index: int, image: ImageSpec) -> NDArray[Any]:
        try:
            return image.pixels_from_image(image_from_pixels(self._images[index]))
        except UnusableImage as exc:
            raise ImageError(f"{self.where(index)}: {exc}") from exc

    def encoded(self, index: int) -> bytes:
        file = io.BytesIO()
        image_from_pixels(self._images[index]).save(file, "PNG")
        return file.getvalue()

    def label(self, index: int) -> Label:
        if self._labels is None:
            return None
        label = self._labels[index]
        return int(label) if label.ndim == 0 else tuple(map(int, label.nonzero()[0]))

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"


def _labels_array(labels: NDArray[Any], name: str) -> NDArray[Any]:
    """Return class indices (N,) or, for multi-label data, 0 and 1 for each class (N, C).  Errors: InputError."""
    if labels.ndim != 2 or labels.shape[1] == 1:
        return labels.reshape(-1)
    if labels.dtype.kind not in "biu" or labels.min() < 0 or labels.max() > 1:
        raise InputError(
            f"{name}: expected labels (N, classes) of 0 and 1, got {labels.dtype} values from {labels.min()} to "
            f"{labels.max()}"
        )
    return labels.astype("int64")


class FileImages(Images):
    """Encoded images, each in a separate file."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        labels: Sequence[Label] | None,
        classes: tuple[str, ...] = (),
        *,
        left_out: Sequence[LeftOutKind] = (),
    ) -> None:
        if not files:
            raise InputError(f"{name}: expected at least one image file, got none; {left_out_text(left_out)}")
        self.name, self.classes, self.left_out = name, classes, tuple(left_out)
        self._files, self._labels = list(files), labels

    def __len__(self) -> int:
        return len(self._files)

    def pixels(self, index: int, image: ImageSpec) -> NDArray[Any]:
        return self._converted(index, partial(pixels_of_file, image=image))

    def encoded(self, index: int) -> bytes:
        return self._converted(index, as_served)

    def _converted(self, index: int, convert: Callable[[bytes], _T]) -> _T:
        try:
            return convert(self._files[index].read_bytes())
        except OSError as exc:
            raise ImageError(f"{self._files[index]}: cannot be read: {exc.strerror or exc}") from exc
        except UnusableImage as exc:
            raise ImageError(f"{self._files[index]}: {exc}") from exc

    def label(self, index: int) -> Label:
        return None if self._labels is None else self._labels[index]

    def where(self, index: int) -> str:
        return str(self._files[index])
