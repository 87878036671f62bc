"""Read, hash and decode images ahead of the network, in threads, with bounded memory.

The images of a shard are read in pieces. At most `_PIECES_AHEAD` pieces a thread are read ahead, and a thread holds the
bytes of a single image at a time (of Parquet: of a few rows), so memory does not grow with the shard.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from gmmvit_deploy.bulk._filesystems import UnreadableImage
from gmmvit_deploy.images.data.other_formats import pixels_of_file
from gmmvit_deploy.inference.preprocess import UnusableImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.images.spec import ImageSpec

_PIECE = 16
_PIECES_AHEAD = 3


class Decoded(NamedTuple):
    """An image before the network: its hash and pixels, or the reason why there are no pixels.

    sha256: hexadecimal hash of the encoded bytes; None if they could not be read.
    pixels: uint8 (height, width, channels), or None.  error: the reason, or None.
    """

    sha256: str | None
    pixels: NDArray[Any] | None
    error: str | None


def decoded_batches(
    contents: Iterable[Callable[[], bytes]], image: ImageSpec, *, batch: int, pool: ThreadPoolExecutor, threads: int
) -> Iterator[list[Decoded]]:
    """Yield the images in their order, ``batch`` at a time; the last batch may be smaller.

    contents: functions that return the bytes of an image.  threads: the number of threads of ``pool``.
    Errors: those that the functions raise, except `UnreadableImage`.
    """
    waiting: deque[Future[list[Decoded]]] = deque()
    pieces = iter(contents)
    ready: list[Decoded] = []
    try:
        while True:
            while len(waiting) < _PIECES_AHEAD * threads + batch // _PIECE and (piece := [*islice(pieces, _PIECE)]):
                waiting.append(pool.submit(_decode, piece, image))
            if not waiting:
                break
            ready += waiting.popleft().result()
            while len(ready) >= batch:
                yield ready[:batch]
                ready = ready[batch:]
        if ready:
            yield ready
    finally:
        for future in waiting:
            future.cancel()


def _decode(contents: Sequence[Callable[[], bytes]], image: ImageSpec) -> list[Decoded]:
    return [_decoded(content, image) for content in contents]


def _decoded(content: Callable[[], bytes], image: ImageSpec) -> Decoded:
    try:
        data = content()
    except UnreadableImage as exc:
        return Decoded(None, None, str(exc))
    digest = hashlib.sha256(data).hexdigest()
    try:
        return Decoded(digest, pixels_of_file(data, image), None)
    except UnusableImage as exc:
        return Decoded(digest, None, str(exc))
