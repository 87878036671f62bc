"""``golden.npz`` of a bundle: reference data from encoded images to logits, which every later stage must reproduce.

    inputs, tensors, logits          inputs of the graph; the same normalised; logits of PyTorch
    image_bytes, image_ends          encoded images, concatenated, and the end of each in bytes
    image_pixels, image_logits       the same images decoded and resized; logits of PyTorch

A bundle without mean and std has no images. Images are losslessly encoded: pixels decoded from a JPEG differ by a level
between builds of libjpeg, which an exact comparison does not allow.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.images import ImageSpec
from gmmvit_deploy.preprocess import UnusableImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GoldenSet", "bytes_from_golden", "golden_from_bytes", "preprocessing_problem"]

_ARRAYS = ("inputs", "tensors", "logits")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenSet:
    """inputs (B, …) of the graph; tensors float32 (B, channels, height, width); logits float32 (B, C).

    images: encoded, of any size.  image_pixels: uint8 (I, height, width, channels);
    image_logits: float32 (I, C).
    """

    inputs: NDArray[Any]
    tensors: NDArray[Any]
    logits: NDArray[Any]
    images: tuple[bytes, ...]
    image_pixels: NDArray[Any]
    image_logits: NDArray[Any]


def bytes_from_golden(golden: GoldenSet) -> bytes:
    """Return the content of ``golden.npz``."""
    import numpy as np

    file = io.BytesIO()
    np.savez(
        file,
        **{name: getattr(golden, name) for name in _ARRAYS},
        image_bytes=np.frombuffer(b"".join(golden.images), np.uint8),
        image_ends=np.cumsum([len(image) for image in golden.images], dtype=np.int64),
        image_pixels=golden.image_pixels,
        image_logits=golden.image_logits,
    )
    return file.getvalue()


def golden_from_bytes(data: bytes) -> GoldenSet:
    """Read the content of ``golden.npz``.  Errors: ValueError, KeyError, OSError or EOFError when it is malformed."""
    import numpy as np

    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        ends = file["image_ends"].tolist()
        joined = file["image_bytes"].tobytes()
        return GoldenSet(
            **{name: file[name] for name in _ARRAYS},
            images=tuple(joined[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)) if ends else (),
            image_pixels=file["image_pixels"],
            image_logits=file["image_logits"],
        )


def preprocessing_problem(golden: GoldenSet, spec: ImageSpec) -> str:
    """Preprocess the golden images and describe the first difference from export; empty if there is no difference."""
    import numpy as np

    for index, (image, expected) in enumerate(zip(golden.images, golden.image_pixels, strict=True)):
        try:
            pixels = spec.pixels_from_bytes(image)
        except UnusableImage as exc:
            return f"golden image {index}: {exc}"
        if pixels.shape != expected.shape or (pixels != expected).any():
            apart = np.abs(pixels.astype(int) - expected) if pixels.shape == expected.shape else np.array([255])
            return (
                f"golden image {index} becomes other pixels here than at export: "
                f"{np.count_nonzero(apart)} values differ, by up to {apart.max()}"
            )
    if golden.inputs.dtype == np.uint8:
        tensors = spec.tensor_from_pixels(golden.inputs)
        if not np.array_equal(tensors, golden.tensors):
            largest = float(np.abs(tensors - golden.tensors).max())
            return f"the golden pixels become another tensor here than at export: it differs by up to {largest:.3g}"
    return ""
