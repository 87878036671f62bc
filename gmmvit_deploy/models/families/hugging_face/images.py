"""The preprocessing that the folder states, as a resize rule, mean and std of this package.

    pixels = crop(resize(image))        tensor = (pixels · rescale_factor − image_mean) / image_std
    tensor = tensor[BGR]                MobileViT's image processor, which does not normalise

transformers has two implementations of most image processors: with Pillow and with torchvision. The rules of this
package equal the former bit for bit. DINOv3's has only the latter, and resizes pixels that are already scaled: with the
bilinear filter, the rules differ from it by at most the step between two values of a pixel. transformers itself, of the
class that the file names, supplies the values of the fields that the file leaves out. A field that no rule honours is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gmmvit_deploy.errors import CheckpointError, MissingDependencyError
from gmmvit_deploy.models.families.hugging_face.network import require_transformers

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
"""The file in which transformers 5 writes the image processor of a processor of images and texts, such as CLIP's."""
_DINOV3 = "DINOv3ViTImageProcessor"
_MOBILEVIT = "MobileViTImageProcessor"
_CONVNEXT = "ConvNextImageProcessor"
_CLASSES = (
    "BeitImageProcessor", "BitImageProcessor", "CLIPImageProcessor", _CONVNEXT, "DeiTImageProcessor",
    _DINOV3, "MobileNetV1ImageProcessor", _MOBILEVIT, "PvtImageProcessor", "SiglipImageProcessor", "ViTImageProcessor",
)  # fmt: skip
"""Image processors that only resize, crop the centre, rescale and normalise.  ConvNeXT's also has ``crop_pct``, and
MobileViT's ``do_flip_channel_order``."""
_FILTERS = {2: "bilinear", 3: "bicubic"}
_FILTER_NAMES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_ABOUT_THE_FILE = {
    "_processor_class", "_valid_processor_keys", "feature_extractor_type", "image_processor_type", "processor_class",
    "use_fast",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "data_format", "default_to_square", "device", "disable_grouping", "do_convert_rgb", "do_reduce_labels",
    "image_seq_length", "input_data_format", "reduce_labels", "return_tensors",
}  # fmt: skip
"""Fields that do not change the tensor of a classifier: every image is converted to the channels of the network."""
_HONOURED = {
    "crop_pct", "crop_size", "do_center_crop", "do_flip_channel_order", "do_normalize", "do_rescale", "do_resize",
    "image_mean", "image_std", "resample", "rescale_factor", "size",
}  # fmt: skip
_WHOLE_SIDE = 384  # from this side on, ConvNeXT's image processor does not crop


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """What the file states, for pixel values scaled to [0, 1].

    size: (height, width) of the images after the preprocessing; None if the images are not resized.
    resize: the name of the resize rule; None if the images are not resized.  crop_pct: as in `images.ImageSpec`.
    bgr: True if the network reads the channels in the order blue, green, red.
    """

    size: tuple[int, int] | None
    resize: str | None
    crop_pct: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bgr: bool = False


def preprocessing_from(
    fields: Mapping[str, Any] | None, *, where: str, model_type: str, channels: int
) -> Preprocessing | None:
    """Return the preprocessing of a classifier; None without file, for an image processor that keeps the channels.

    fields: the content of the file, whose path is ``where``; None if the folder has no such file.
    model_type: ``model_type`` of ``config.json``, which names the image processor if the file does not.
    Errors: CheckpointError that names a field that no rule of this package honours.
    """
    file = _File(where)
    if fields is None:
        if _default_class(model_type) == _MOBILEVIT:
            raise file.missing(_MOBILEVIT)
        return None
    name = _class_name(fields, file, model_type)
    for field in fields:
        if field not in _ABOUT_THE_FILE | _WITHOUT_EFFECT | _HONOURED | {"do_pad", "pad_size"}:
            raise file.refused(field, fields[field], "gmmvit does not know this field", "a field that gmmvit knows")
    for field, owner in (("crop_pct", _CONVNEXT), ("do_flip_channel_order", _MOBILEVIT)):
        if fields.get(field) and name != owner:
            raise file.refused(field, fields[field], f"{name} does not read this field", "no such field")
    processor = _processor(name, fields, file)
    bgr = bool(getattr(processor, "do_flip_channel_order", False))
    if bgr and channels != 3:
        raise file.refused("do_flip_channel_order", True, f"the network reads {channels} channels", "3 channels")
    if name == _DINOV3 and processor.do_resize and processor.resample != 2:
        why = f"{name} does not limit the values after this filter to those of pixels, as the filters of gmmvit do"
        raise file.refused("resample", processor.resample, why, "2 (bilinear)")
    if processor.do_pad or fields.get("pad_size") is not None:
        field = "do_pad" if processor.do_pad else "pad_size"
        raise file.refused(field, fields.get(field), "padding is not supported", "no padding")
    size, fit, crop_pct = _geometry(name, processor, file)
    mean, std = _normalisation(processor, file, channels, normalises=name != _MOBILEVIT)
    resize = None if fit is None else f"{fit}-{_filter(processor.resample, file)}"
    return Preprocessing(size=size, resize=resize, crop_pct=crop_pct, mean=mean, std=std, bgr=bgr)


@dataclass(frozen=True, slots=True)
class _File:
    path: str

    def refused(self, field: str, value: Any, why: str, expected: str) -> CheckpointError:
        name = self.path.rpartition("/")[2]
        other = "" if field.endswith("_type") else f"if training used another value, correct {field} in {name}; "
        return CheckpointError(
            f"{self.path}: the field {field} is {value!r}: {why}; expected {expected}",
            hint=f"{other}{'otherwise ' if other else ''}add --input tensor, and send the bundle the tensors that the "
            "image processor of the folder computes",
        )

    def missing(self, name: str) -> CheckpointError:
        """Return the error for a folder without the file, whose network may read the channels in another order."""
        folder = self.path.rpartition("/")[0]
        values = "size={'shortest_edge': 288}, crop_size={'height': 256, 'width': 256}, do_flip_channel_order=True"
        return CheckpointError(
            f"{self.path}: no such file; {name} of transformers reverses the channels of the images unless this file "
            "states that training did not",
            hint=f"copy the file into the folder, or write it with the values of training: type python -c "
            f"\"from transformers import {name} as P; P({values}).save_pretrained('{folder}')\"",
        )


def _default_class(model_type: str) -> str | None:
    """Return the image processor that transformers uses for a kind of model if the folder names none."""
    require_transformers()
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    name: str | None = (IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}).get("torchvision")
    return name


def _class_name(fields: Mapping[str, Any], file: _File, model_type: str) -> str:
    """Return the name of the image processor, without the suffix of an implementation."""
    field = next((key for key in ("image_processor_type", "feature_extractor_type") if fields.get(key)), None)
    stated = fields[field] if field else _default_class(model_type)
    if not isinstance(stated, str):
        raise file.refused(
            "image_processor_type", stated, "the class of the image processor is not known", ", ".join(_CLASSES)
        )
    name = stated.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if name == "Siglip2ImageProcessor":
        raise CheckpointError(
            f"{file.path}: {stated} cuts images of any size into patches; expected a network that reads images of one "
            "size",
            hint="export a SigLIP 2 of fixed resolution, whose image processor is SiglipImageProcessor",
        )
    if name not in _CLASSES:
        why = "gmmvit does not compute the operations of this class"
        raise file.refused(field or "image_processor_type", stated, why, ", ".join(_CLASSES))
    return name


def _processor(name: str, fields: Mapping[str, Any], file: _File) -> Any:
    """Return transformers' image processor, with Pillow if there is one, with the values of all fields."""
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    given = {key: value for key, value in fields.items() if key in _HONOURED | {"default_to_square", "do_pad"}}
    try:
        return get_image_processor_class_from_name(name if name == _DINOV3 else f"{name}Pil")(**given)
    except ImportError as exc:
        raise MissingDependencyError(f"torchvision, which {name} of transformers needs,", extra="timm") from exc
    # The values come from a file; transformers checks them with exceptions of several libraries.
    except Exception as exc:
        raise CheckpointError(
            f"{file.path}: {name} does not take these fields: {' '.join(str(exc).split())}",
            hint=f"copy or download {file.path.rpartition('/')[2]} again",
        ) from exc


def _filter(resample: Any, file: _File) -> str:
    if resample not in _FILTERS:
        name = _FILTER_NAMES.get(resample, "unknown")
        expected = " or ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise file.refused("resample", resample, f"the filter {name} is not supported", expected)
    return _FILTERS[resample]


def _geometry(name: str, processor: Any, file: _File) -> tuple[tuple[int, int] | None, str | None, float]:
    """Return (size after the preprocessing, way of fitting as in `preprocess`, crop_pct)."""
    crop = dict(processor.crop_size or {}) if processor.do_center_crop else None
    if not processor.do_resize:
        if crop is not None:
            raise file.refused("do_center_crop", True, "a crop without resizing is not supported", "do_resize true")
        return None, None, 1.0
    size = dict(processor.size)
    if name == _CONVNEXT:
        return _of_convnext(size, crop, processor.crop_pct, file)
    if crop is not None and crop.keys() != {"height", "width"}:
        raise file.refused("crop_size", crop, "other sizes are not supported", "height and width")
    if size.keys() == {"height", "width"}:
        whole = size["height"], size["width"]
        return (whole, "stretch", 1.0) if crop is None else _squashed(whole, (crop["height"], crop["width"]), file)
    if size.keys() != {"shortest_edge"}:
        raise file.refused("size", size, "other sizes are not supported", "height and width, or shortest_edge")
    edge = size["shortest_edge"]
    if crop is None:
        why = "with size {'shortest_edge': …} and without a crop, images keep different sizes"
        raise file.refused("do_center_crop", processor.do_center_crop, why, "true")
    if crop["height"] != crop["width"] or crop["height"] > edge:
        raise file.refused("crop_size", crop, f"size is {size}", f"a square of at most {edge} pixels")
    return (crop["height"], crop["width"]), "shortest", _crop_pct(crop["height"], edge)


def _of_convnext(
    size: Mapping[str, int], crop: Mapping[str, int] | None, crop_pct: float, file: _File
) -> tuple[tuple[int, int], str, float]:
    if size.keys() != {"shortest_edge"}:
        raise file.refused("size", dict(size), f"{_CONVNEXT} reads only shortest_edge", "shortest_edge")
    if crop is not None:
        raise file.refused("do_center_crop", True, f"{_CONVNEXT} crops by crop_pct", "false")
    side = size["shortest_edge"]
    if side >= _WHOLE_SIDE:
        return (side, side), "stretch", 1.0
    if not 0 < crop_pct <= 1:
        raise file.refused("crop_pct", crop_pct, "other values are not supported", "a number above 0 and at most 1")
    return (side, side), "shortest", float(crop_pct)


def _squashed(whole: tuple[int, int], crop: tuple[int, int], file: _File) -> tuple[tuple[int, int], str, float]:
    if whole == crop:
        return crop, "stretch", 1.0
    crop_pct = _crop_pct(crop[0], whole[0])
    # The rule squash rounds half a pixel to the even number; transformers rounds it down.
    rounded = all((large - small) // 2 == round((large - small) / 2) for large, small in zip(whole, crop, strict=True))
    fits = crop[0] <= whole[0] and [math.floor(side / crop_pct) for side in crop] == list(whole)
    if not (rounded and fits):
        stated = dict(zip(("height", "width"), crop, strict=True))
        raise file.refused(
            "crop_size",
            stated,
            f"size is {whole[0]} × {whole[1]}",
            "a crop with the aspect ratio of size, by an even number of pixels",
        )
    return crop, "squash", crop_pct


def _crop_pct(crop: int, side: int) -> float:
    """Return a number p with ⌊crop / p⌋ = side."""
    share = crop / side if side >= crop else 1.0
    while math.floor(crop / share) < side:
        share = math.nextafter(share, 0.0)
    return share


def _normalisation(
    processor: Any, file: _File, channels: int, *, normalises: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) for pixels / 255, from numbers for pixels · rescale_factor.

    (pixels · r − mean) / std = (pixels / 255 − mean / (255 r)) / (std / (255 r))
    """
    factor = processor.rescale_factor if processor.do_rescale else 1.0
    if not factor > 0 or not math.isfinite(factor):
        raise file.refused("rescale_factor", factor, "other values are not supported", "a number above 0")
    values: list[tuple[float, ...]] = []
    for field, neutral in (("image_mean", 0.0), ("image_std", 1.0)):
        stated = getattr(processor, field) if normalises and processor.do_normalize else neutral
        numbers = tuple(stated) if isinstance(stated, list | tuple) else (stated,) * channels
        if len(numbers) != channels or not all(isinstance(number, int | float) for number in numbers):
            raise file.refused(field, stated, f"the network reads {channels} channels", f"{channels} numbers")
        if field == "image_std" and min(numbers) <= 0:
            raise file.refused(field, stated, "other values are not supported", "numbers above 0")
        scale = 1.0 if factor == 1 / 255 else 255 * factor
        values.append(tuple(number / scale for number in numbers))
    return values[0], values[1]
