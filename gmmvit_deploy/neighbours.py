"""The share of nearest neighbours that the features of a program keep: what a search by cosine loses.

    near(i)    the `NEIGHBOURS` images nearest to image i, of all images but i, by the cosine of the program's features
    kept(i)    the share of near(i) that PyTorch's float32 features call as near as the tenth nearest image

The share is the mean of kept(i) over the images, each of which is searched for among the others. Of images that are
equally near by PyTorch's features, any counts, so that rounding loses no neighbour.

The share is that of a search among these images: among more images, the tenth nearest is nearer. Where PyTorch's own
features hold most images equally near, any features keep most neighbours, and the share says nothing.

The interval of the share is Wilson's for n images that each keep all or none: kept(i) lies between 0 and 1, and so
varies at most as much as a yes or no with the same mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.intervals import Measured, share_interval

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

NEIGHBOURS = 10
KEEP_NEIGHBOURS = 0.9
"""The share to keep, if the user states no other."""
MIN_IMAGES = 100
"""Of fewer images, ten are too large a part: features without any relation keep a tenth of 100."""
MAX_BY_CHANCE = 0.5
"""The largest share that features without any relation may keep; above it, the images judge nothing."""
_TIE = 1e-6  # rounding of a cosine in float32
_CHUNK = 1024


def kept_neighbours(features: NDArray[Any], reference: NDArray[Any]) -> Measured:
    """Return the share of nearest neighbours that features keep, with its one-sided 95 % bounds.

    features: (N, D), of the program; an image whose features are not finite keeps none.
    reference: (N, D), PyTorch's float32 features.
    Errors: ValueError, with the reason, for images that judge nothing: fewer than `MIN_IMAGES`, or equally near.
    """
    import numpy as np

    count = len(reference)
    if count < MIN_IMAGES:
        raise ValueError(f"too few images to decide: {count}, expected at least {MIN_IMAGES}")
    finite = np.isfinite(features).all(1)
    ours, theirs = _unit(np.where(finite[:, None], features, 0)), _unit(reference)
    kept = by_chance = 0.0
    for start in range(0, count, _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, count))
        own = (rows - start, rows)
        near, exact = ours[rows] @ ours.T, theirs[rows] @ theirs.T
        near[own] = exact[own] = -np.inf
        found = np.argpartition(near, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS:]
        tenth = np.partition(exact, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS, None]
        as_near = np.take_along_axis(exact, found, axis=1) >= tenth - _TIE
        kept += float(as_near[finite[rows]].mean(1).sum())
        by_chance += float((exact >= tenth - _TIE).sum()) / (count - 1) / count
    if by_chance > MAX_BY_CHANCE:
        raise ValueError(
            f"PyTorch's features hold most of these images equally near: any features keep {by_chance:.0%} of the "
            f"{NEIGHBOURS} nearest neighbours"
        )
    low, high = share_interval(kept, count)
    return Measured(value=kept / count, low=low, high=high)


def _unit(features: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    rows = features.astype(np.float32)
    unit: NDArray[Any] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
