"""Read real images as batches of a bundle's input.

The images come from image files, from named data such as ``cifar10:FOLDER``, or from an array file (.npz or .npy). They
calibrate a graph, or show what images are usual, so they are those of the split ``train`` if the data has splits: the
split ``test`` remains for the judgement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import image_files, split_folder
from gmmvit_deploy.images.data.formats import arrays_in
from gmmvit_deploy.images.data.images import FileImages, Images, Label, evenly_spaced
from gmmvit_deploy.images.data.open import is_named, open_data, require_data
from gmmvit_deploy.images.names import shown_names
from gmmvit_deploy.inference.labels import distinct_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle, InputKind
    from gmmvit_deploy.images.spec import ImageSpec


_ARRAY_SUFFIXES = (".npy", ".npz")
_SPLIT = "train"


@dataclass(slots=True, kw_only=True)
class ImageBatches:
    """Images that can be iterated as batches of the bundle's input.

    Of images with the same input, only the first is in a batch: images that set ranges must not also judge them.
    source: the name of the data, with its split.  count: the number of images, with copies.
    sha256: the hash of all batches of the latest iteration, in order. The hash identifies the data of a calibration.
    """

    source: str
    count: int
    _bundle: Bundle
    _batch: int
    _images: list[Callable[[], NDArray[Any]]] | NDArray[Any]
    _labels: Sequence[Label] = ()
    _classes: tuple[str, ...] = ()
    _digest: Any = field(default_factory=hashlib.sha256)
    _hashes: dict[str, int] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return str(self._digest.hexdigest())

    def record(self) -> dict[str, Any]:
        """Return what a record of a calibration keeps: the source, and the hashes of the latest iteration."""
        return {
            "source": self.source,
            "sha256": self.sha256,
            "image_sha256": list(self._hashes),
            "copies": self.count - len(self._hashes),
        }

    def labels(self, classes: Sequence[str]) -> NDArray[Any] | None:
        """Return the index of each image's class among the bundle's ``classes``, (N,); None if an image has none.

        The images are those of the latest iteration; before the first, all with their copies.
        Data that names no classes has the bundle's classes.
        Errors: InputError when the data has a class that the bundle lacks.
        """
        import numpy as np

        if not self._labels or not all(isinstance(label, int) for label in self._labels):
            return None
        names = distinct_names(classes)
        own = names if self._classes in ((), tuple(classes)) else self._classes
        if unknown := [name for name in own if name not in names]:
            raise InputError(
                f"{self.source}: expected classes of the bundle, such as {shown_names(names[:3])}; the data has "
                f"{shown_names(unknown[:3])}"
            )
        order = np.array([names.index(name) for name in own])
        labels = np.array(self._labels)[list(self._hashes.values()) or slice(None)]
        if not 0 <= labels.min() <= labels.max() < len(order):
            raise InputError(f"{self.source}: expected labels from 0 to {len(order) - 1}, got {labels.max()}")
        indices: NDArray[Any] = order[labels]
        return indices

    def __iter__(self) -> Iterator[NDArray[Any]]:
        import numpy as np

        self._digest, self._hashes = hashlib.sha256(), {}
        for start in range(0, self.count, self._batch):
            part = self._images[start : start + self._batch]
            inputs = np.stack([decode() for decode in part]) if isinstance(part, list) else part
            if inputs.dtype == np.uint8:
                inputs = self._bundle.inputs_from_pixels(inputs)
            for index, digest in enumerate(image_hashes(inputs), start):
                self._hashes.setdefault(digest, index)
            inputs = inputs[[index - start for index in self._hashes.values() if index >= start]]
            if len(inputs):
                self._digest.update(np.ascontiguousarray(inputs).tobytes())
                yield inputs


def image_hashes(inputs: NDArray[Any]) -> list[str]:
    """Return the SHA-256 of each image of a batch (B, …) in the form of the graph's input.

    Files of the same image have the same hash if they decode to the same pixels.
    """
    return [hashlib.sha256(image.tobytes()).hexdigest() for image in inputs]


def open_images(bundle: Bundle, source: str, *, limit: int, batch: int = 32) -> ImageBatches:
    """Open real images as batches of a bundle's input.

    source: named data (`data.open`); or an image file, a folder of image files, or a pattern of file names; or an .npz
    or .npy file with an array of the graph's input. Named data and a folder with a subfolder ``train`` give the split
    ``train``, unless the name ends with ``#test``.
    limit: the maximum number of images; of more, images at equal distances are chosen.  batch: images in a batch.
    Errors: InputError when the source has no image, or when an array has another shape or data type than the graph's
    input, or has values that are not finite.
    """
    if _is_array(source):
        array = _array(Path(source), bundle.manifest.image, bundle.manifest.input_kind)
        chosen = evenly_spaced(len(array), limit)
        stored = arrays_in(Path(source)).get("labels")
        labels = stored[chosen].tolist() if stored is not None and len(stored) == len(array) else ()
        return ImageBatches(
            source=source, count=len(chosen), _bundle=bundle, _batch=batch, _images=array[chosen], _labels=labels
        )
    images = _opened(source)
    indices = [int(index) for index in evenly_spaced(len(images), limit)]
    decoders: list[Callable[[], NDArray[Any]]] = [
        partial(images.pixels, index, bundle.manifest.image) for index in indices
    ]
    return ImageBatches(
        source=images.name,
        count=len(decoders),
        _bundle=bundle,
        _batch=batch,
        _images=decoders,
        _labels=[images.label(index) for index in indices],
        _classes=images.classes,
    )


def require_source(source: str) -> None:
    """Check that a source exists, without reading images.  Errors: InputError when the source does not exist."""
    if is_named(source):
        require_data(source)
    elif not _is_array(source):
        image_files([source])
    elif not Path(source).is_file():
        raise InputError(f"{source}: no such file")


def require_images(source: str, image: ImageSpec, input_kind: InputKind) -> None:
    """Check that the images of ``source`` fit a network.

    The check reads a whole array file, but only the first image of any other source.
    Errors: InputError as for `open_images`.  ImageError when the first image cannot be decoded.
    """
    if _is_array(source):
        _array(Path(source), image, input_kind)
    else:
        _opened(source).pixels(0, image)


def _is_array(source: str) -> bool:
    return Path(source).suffix.lower() in _ARRAY_SUFFIXES and not is_named(source)


def _opened(source: str) -> Images:
    if is_named(source):
        return open_data(source, split=_SPLIT)
    files = str(split_folder(Path(source), _SPLIT)) if Path(source).is_dir() else source
    return FileImages(files, image_files([files]), None)


def _array(path: Path, image: ImageSpec, input_kind: InputKind) -> NDArray[Any]:
    import numpy as np

    arrays = arrays_in(path)
    names: list[str] = [name for name in ("images", "inputs") if name in arrays] or list(arrays)
    if names[:1] not in (["images"], ["inputs"]) and len(names) != 1:
        raise InputError(f"{path}: expected an array called images, got {', '.join(names) or 'no array'}")
    array = arrays[names[0]]
    expected: set[tuple[str, tuple[int, ...]]] = {("uint8", image.pixels_shape)}
    if input_kind == "tensor":
        expected.add(("float32", image.tensor_shape))
    if (str(array.dtype), tuple(array.shape[1:])) not in expected:
        shapes = " or ".join(f"{kind} (N, {', '.join(map(str, shape))})" for kind, shape in sorted(expected))
        raise InputError(f"{path}: expected {shapes}, got {array.dtype} {tuple(array.shape)}")
    if not len(array):
        raise InputError(f"{path}: it holds no image, expected at least 1")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError(f"{path}: some values are not finite (NaN or infinity)")
    return array
