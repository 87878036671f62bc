"""The inputs of a parity run: golden inputs, random inputs, and a stream of real images.

Golden inputs and golden images are stored in the bundle, with the logits that PyTorch computed at export. Golden and
random inputs are a single batch each. Real images are read batch by batch, so that memory holds at most one batch of
real images. Of images with the same pixels, only the first is read: a share of images, and its interval, counts
independent images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.exporting.golden import RANDOM, fresh_inputs
from gmmvit_deploy.images.data.images import Images, Label, evenly_spaced
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes

OnBroken = Literal["fail", "skip"]
_NAMED_BROKEN = 100
_GOLDEN_RATIO = (5**0.5 - 1) / 2
"""The multiples of this number, modulo 1, divide the unit interval evenly, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """inputs: (B, …) in the form of the graph's input.  where: a text that identifies each input."""

    inputs: NDArray[Any]
    where: tuple[str, ...]
    labels: tuple[Label, ...]


def golden_batch(bundle: Bundle) -> tuple[Batch, NDArray[Any]]:
    """Return a batch of the golden inputs, then the golden images, and its stored logits (B, C)."""
    inputs, outputs = bundle.golden_rows()
    logits = next(iter(outputs.values()))
    images = len(bundle.golden_set().images)
    where = [f"reference input {index}" for index in range(len(inputs) - images)]
    where += [f"reference image {index}" for index in range(images)]
    return Batch(inputs=inputs, where=tuple(where), labels=(None,) * len(where)), logits


def random_batch(bundle: Bundle) -> Batch:
    """Return random inputs, the same in every run."""
    where = tuple(f"random input {index}" for index in range(RANDOM))
    return Batch(inputs=fresh_inputs(bundle, RANDOM), where=where, labels=(None,) * RANDOM)


@dataclass(slots=True, kw_only=True, eq=False)
class ImageStream:
    """Batches of the distinct images of a data set.  Iterate over a stream only once.

    The first images, however many, are spread over the data, which are often sorted by class.
    limit: the number of images to read, spread evenly over the data; None reads all images.
    taken, sha256: the indices of the images yielded so far, in the order of the batches, and the hash of their pixels.
    copies: the number of images left out so far, because they have the pixels of an earlier one.
    broken_count: the number of images that could not be decoded.  broken: (image, reason) for the first of them.
    """

    bundle: Bundle
    images: Images
    batch: int
    limit: int | None = None
    on_broken: OnBroken = "fail"
    broken: list[tuple[str, str]] = field(default_factory=list)
    broken_count: int = 0
    copies: int = 0
    taken: list[int] = field(default_factory=list)
    _digest: Any = field(default_factory=hashlib.sha256)
    _hashes: set[str] = field(default_factory=set)

    @property
    def count(self) -> int:
        """The number of images to read, including broken images and copies."""
        return len(self.images) if self.limit is None else min(self.limit, len(self.images))

    @property
    def sha256(self) -> str:
        return str(self._digest.hexdigest())

    def indices(self) -> NDArray[Any]:
        """Return the indices of the images to read, ascending and distinct."""
        return evenly_spaced(len(self.images), self.count)

    @property
    def done(self) -> int:
        """The number of images of `count` that were read so far."""
        return len(self.taken) + self.broken_count + self.copies

    def described(self) -> dict[str, Any]:
        return {
            "name": self.images.name,
            "images": len(self.taken),
            "of": len(self.images),
            "sha256": self.sha256,
            "copies": self.copies,
            "broken": self.broken_count,
            "broken_images": [{"image": where, "why": why} for where, why in self.broken],
            "left_out": [asdict(kind) for kind in self.images.left_out],
        }

    def __iter__(self) -> Iterator[Batch]:
        """Errors: ImageError on a broken image if ``on_broken`` is ``fail``.  InputError when none can be decoded."""
        image = self.bundle.manifest.image
        pixels: list[NDArray[Any]] = []
        taken: list[int] = []
        indices = self.indices()
        for index in map(int, indices[np.argsort(np.arange(len(indices)) * _GOLDEN_RATIO % 1)]):
            try:
                decoded = self.images.pixels(index, image)
            except ImageError as exc:
                self._note_broken(index, exc)
                continue
            (digest,) = image_hashes(decoded[None])
            if digest in self._hashes:
                self.copies += 1
                continue
            self._hashes.add(digest)
            pixels.append(decoded)
            taken.append(index)
            if len(taken) == self.batch:
                yield self._made(pixels, taken)
                pixels, taken = [], []
        if taken:
            yield self._made(pixels, taken)
        if not self.taken:
            raise InputError(f"{self.images.name}: all {self.count} images are broken, so parity has no image to check")

    def _note_broken(self, index: int, exc: ImageError) -> None:
        if self.on_broken == "fail":
            raise ImageError(
                str(exc), hint="remove the broken image, or add --on-broken skip to leave broken images out"
            ) from exc
        self.broken_count += 1
        if len(self.broken) < _NAMED_BROKEN:
            where = self.images.where(index)
            self.broken.append((where, str(exc).removeprefix(f"{where}: ")))

    def _made(self, pixels: list[NDArray[Any]], taken: list[int]) -> Batch:
        stacked = np.stack(pixels)
        self._digest.update(stacked.tobytes())
        self.taken += taken
        return Batch(
            inputs=self.bundle.inputs_from_pixels(stacked),
            where=tuple(self.images.where(index) for index in taken),
            labels=tuple(self.images.label(index) for index in taken),
        )
