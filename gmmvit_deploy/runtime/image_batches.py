"""Real images, from a folder or an array file, as batches of what a bundle's graph takes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.data.files import image_files
from gmmvit_deploy.data.formats import arrays_in
from gmmvit_deploy.data.images import FileImages
from gmmvit_deploy.data.open import is_named, open_data
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.artifacts import Bundle

__all__ = ["ImageBatches", "open_images"]

_ARRAY_SUFFIXES = (".npy", ".npz")


@dataclass(slots=True, kw_only=True)
class ImageBatches:
    """Iterate over it: arrays (≤ batch, …) as the bundle's graph takes them.

    source: as it was named.  count: of images.  ``sha256`` is of every image that was handed out,
    in order, so it says which data a calibration saw.
    """

    source: str
    count: int
    _bundle: Bundle
    _batch: int
    _images: list[Callable[[], NDArray[Any]]] | NDArray[Any]
    _digest: Any = field(default_factory=hashlib.sha256)

    @property
    def sha256(self) -> str:
        return str(self._digest.hexdigest())

    def __iter__(self) -> Iterator[NDArray[Any]]:
        import numpy as np

        self._digest = hashlib.sha256()
        for start in range(0, self.count, self._batch):
            part = self._images[start : start + self._batch]
            inputs = np.stack([decode() for decode in part]) if isinstance(part, list) else part
            if inputs.dtype == np.uint8:
                inputs = self._bundle.inputs_from_pixels(inputs)
            self._digest.update(np.ascontiguousarray(inputs).tobytes())
            yield inputs


def open_images(bundle: Bundle, source: str, *, limit: int, batch: int = 32) -> ImageBatches:
    """Named data (`data.open`), a folder, file or pattern of images, or an .npz or .npy of the graph's own input.

    limit: how many are taken, spread evenly over what is there.
    Errors: InputError when there is nothing, when an array has another shape or type, or holds
    numbers that are not finite.
    """
    if Path(source).suffix.lower() in _ARRAY_SUFFIXES and not is_named(source):
        array = _array(bundle, Path(source))
        chosen = _spread(len(array), limit)
        return ImageBatches(source=source, count=len(chosen), _bundle=bundle, _batch=batch, _images=array[chosen])
    images = open_data(source) if is_named(source) else FileImages(source, image_files([source]), None)
    decoders: list[Callable[[], NDArray[Any]]] = [
        partial(images.pixels, int(index), bundle.manifest.image) for index in _spread(len(images), limit)
    ]
    return ImageBatches(source=source, count=len(decoders), _bundle=bundle, _batch=batch, _images=decoders)


def _spread(count: int, limit: int) -> NDArray[Any]:
    import numpy as np

    chosen: NDArray[Any] = np.unique(np.linspace(0, count - 1, min(limit, count)).round().astype(int))
    return chosen


def _array(bundle: Bundle, path: Path) -> NDArray[Any]:
    import numpy as np

    found = arrays_in(path)
    names: list[str] = [name for name in ("images", "inputs") if name in found] or list(found)
    if names[:1] not in (["images"], ["inputs"]) and len(names) != 1:
        raise InputError(f"{path}: arrays {', '.join(names) or 'none'}; one called images was wanted")
    array = found[names[0]]
    wanted = {("uint8", bundle.manifest.image.pixels_shape), (bundle.input_dtype, bundle.input_shape)}
    if (str(array.dtype), tuple(array.shape[1:])) not in wanted:
        shapes = " or ".join(f"{kind} (N, {', '.join(map(str, shape))})" for kind, shape in sorted(wanted))
        raise InputError(f"{path}: {shapes} was wanted, found {array.dtype} {tuple(array.shape)}")
    if not len(array):
        raise InputError(f"{path}: it holds no image")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError(f"{path}: it holds numbers that are not finite")
    return array
