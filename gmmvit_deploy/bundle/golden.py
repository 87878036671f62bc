"""Read and write ``golden.npz`` of a bundle: inputs, encoded images, and PyTorch's logits for inputs and images.

The file is written at export. Every runner must reproduce the logits, and every preprocessing must reproduce the pixels
of the images.

    inputs          inputs of the graph
    tensors         the inputs after normalisation
    logits          PyTorch's logits for the inputs
    image_bytes     encoded images, concatenated
    image_ends      offset in image_bytes at which each image ends
    image_pixels    the images, decoded and resized
    image_logits    PyTorch's logits for the images

In a bundle without logits, ``features`` and ``image_features`` take the place of ``logits`` and ``image_logits``. A
bundle with logits and features has all four arrays.
A bundle without mean and std has no golden images. The images are encoded without loss, because the pixels must be
equal, and two builds of libjpeg can decode a JPEG to pixels that differ by 1.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.preprocess import UnusableImage
from gmmvit_deploy.models.specs import OutputName

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ARRAYS = ("inputs", "tensors")
_ALSO = ("features", "image_features")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenSet:
    """Content of ``golden.npz`` for B inputs, I images of various sizes and C classes.

    inputs: (B, …).  tensors: float32 (B, channels, height, width).  logits, image_logits: float32 (B, C) and (I, C).
    image_pixels: uint8 (I, height, width, channels).
    output: the name of the output that ``logits`` and ``image_logits`` hold.
    features, image_features: float32 (B, D) and (I, D), of a bundle with logits and features; else None.
    """

    inputs: NDArray[Any]
    tensors: NDArray[Any]
    logits: NDArray[Any]
    images: tuple[bytes, ...]
    image_pixels: NDArray[Any]
    image_logits: NDArray[Any]
    output: OutputName = "logits"
    features: NDArray[Any] | None = None
    image_features: NDArray[Any] | None = None


def bytes_from_golden(golden: GoldenSet) -> bytes:
    """Return the content of ``golden.npz``."""
    import numpy as np

    file = io.BytesIO()
    also = {"features": golden.features, "image_features": golden.image_features}
    arrays: dict[str, Any] = {
        **{name: getattr(golden, name) for name in _ARRAYS},
        "image_bytes": np.frombuffer(b"".join(golden.images), np.uint8),
        "image_ends": np.cumsum([len(image) for image in golden.images], dtype=np.int64),
        "image_pixels": golden.image_pixels,
        golden.output: golden.logits,
        f"image_{golden.output}": golden.image_logits,
        **{name: values for name, values in also.items() if values is not None},
    }
    np.savez(file, **arrays)
    return file.getvalue()


def golden_from_bytes(data: bytes) -> GoldenSet:
    """Read the content of ``golden.npz``.  Errors: ValueError, KeyError, OSError or EOFError for malformed content.

    The arrays must be stored without compression, as `bytes_from_golden` writes them: a compressed array of a few
    megabytes could fill the memory.
    """
    import zipfile

    import numpy as np

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("expected arrays without compression")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            output: OutputName = "logits" if "logits" in file else "features"
            ends = file["image_ends"].tolist()
            joined = file["image_bytes"].tobytes()
            golden = GoldenSet(
                **{name: file[name] for name in _ARRAYS},
                images=tuple(joined[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))
                if ends
                else (),
                image_pixels=file["image_pixels"],
                logits=file[output],
                image_logits=file[f"image_{output}"],
                output=output,
                **{name: file[name] for name in _ALSO if output == "logits" and name in file},
            )
    except (OSError, ValueError, KeyError, EOFError):
        raise
    # A malformed header can raise any exception: it can state a huge array, or nest brackets thousands of times.
    except Exception as exc:
        raise ValueError(f"malformed arrays ({type(exc).__name__})") from exc
    if problem := _problem(golden):
        raise ValueError(problem)
    return golden


def _problem(golden: GoldenSet) -> str:
    """Return the first contradiction between the arrays; empty if there is no contradiction."""
    inputs, tensors, logits = golden.inputs, golden.tensors, golden.logits
    if logits.dtype != "float32" or logits.ndim != 2 or tensors.dtype != "float32" or tensors.ndim != 4:
        return f"expected float32 logits (B, C) and tensors (B, …), got {_array(logits)} and {_array(tensors)}"
    channels_last = tensors.transpose(0, 2, 3, 1).shape
    shapes = {"uint8": channels_last, "float32": tensors.shape}
    if not len(inputs) == len(tensors) == len(logits) > 0 or inputs.shape != shapes.get(str(inputs.dtype)):
        return f"expected inputs of the tensors {_array(tensors)}, with logits, got {_array(inputs)}, {_array(logits)}"
    if golden.features is not None and (
        golden.image_features is None
        or golden.features.shape[:-1] != logits.shape[:-1]
        or golden.image_features.shape[:-1] != golden.image_logits.shape[:-1]
    ):
        return f"expected features for all logits, got {_array(golden.features)}"
    images = len(golden.images)
    if images and golden.image_logits.shape != (images, logits.shape[1]):
        return f"expected logits of {images} images, got {_array(golden.image_logits)}"
    return ""


def _array(values: NDArray[Any]) -> str:
    return f"{values.dtype} {values.shape}"


def preprocessing_problem(golden: GoldenSet, spec: ImageSpec) -> str:
    """Preprocess the golden images; return the first difference from the pixels at export in words, or ""."""
    import numpy as np

    for index, (image, expected) in enumerate(zip(golden.images, golden.image_pixels, strict=True)):
        try:
            pixels = spec.pixels_from_bytes(image)
        except UnusableImage as exc:
            return f"reference image {index}: {exc}"
        if pixels.shape != expected.shape or (pixels != expected).any():
            apart = np.abs(pixels.astype(int) - expected) if pixels.shape == expected.shape else np.array([255])
            return (
                f"the pixels of reference image {index} differ from the pixels at export: "
                f"{np.count_nonzero(apart)} values differ, by up to {apart.max()}"
            )
    if golden.inputs.dtype == np.uint8:
        tensors = spec.tensor_from_pixels(golden.inputs)
        if not np.array_equal(tensors, golden.tensors):
            largest = float(np.abs(tensors - golden.tensors).max())
            return f"the normalised reference inputs differ from those at export, by up to {largest:.3g}"
    return ""
