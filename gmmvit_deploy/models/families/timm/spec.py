"""Spec of a model that timm builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from gmmvit_deploy.models.specs import (
    INTERPOLATIONS,
    Interpolation,
    MaskKind,
    ModelSpec,
    plain_json,
    require,
    require_counts,
)

CONV_STEM_VIT = "torchvision:VisionTransformer"
"""The name of torchvision's vision transformer, with or without a convolution stem.  timm does not know this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmSpec(ModelSpec):
    """A model that ``timm.create_model(architecture, **model_args)`` builds, or torchvision's ViT (`CONV_STEM_VIT`).

    architecture: timm's name, without a tag.  model_args: as JSON values; timm's defaults apply to all others.
    image_width: the width of the images in pixels if it differs from the height, which is ``image_size``.
    head_blocks: the number of last blocks whose class tokens a linear head of DINO or DINOv2 reads; 0 without a linear
    head.  head_average: True if the linear head also reads the mean of the patches of the last block.
    head_interleaved: True if the features of class token and mean alternate, as in DINO's eval_linear.py.
    resized_from: (height, width) of the images in training if export built the model for another size, else None.
    interpolation: the algorithm that resampled the position embeddings (`layers.positions`); None if no position
    embedding was resampled.
    """

    family: ClassVar[str] = "timm"
    headless: ClassVar[bool] = True
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = get_args(MaskKind)
    architecture: str
    model_args: Mapping[str, Any] = field(default_factory=dict)
    image_width: int | None = None
    head_blocks: int = 0
    head_average: bool = False
    head_interleaved: bool = False
    resized_from: tuple[int, int] | None = None
    interpolation: Interpolation | None = None

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require(bool(self.architecture), "architecture: expected a name of timm, got an empty name")
        object.__setattr__(self, "model_args", plain_json(self.model_args, "model_args"))
        if self.image_width is not None:
            require_counts(self, "image_width")
        require(self.head_blocks >= 0, f"head_blocks: expected at least 0, got {self.head_blocks}")
        require(
            self.head_blocks > 0 or not self.head_average,
            "head_average: expected False without a linear head (head_blocks is 0), got True",
        )
        if self.resized_from is not None:
            require_counts(self, "resized_from")
            require(
                len(self.resized_from) == 2, f"resized_from: expected height and width, got {list(self.resized_from)}"
            )
        if self.interpolation is not None:
            known = ", ".join(INTERPOLATIONS)
            require(
                self.interpolation in INTERPOLATIONS,
                f"interpolation: expected one of {known}, got {self.interpolation!r}",
            )
            require(self.resized_from is not None, "interpolation is only for a model that was resized")

    @property
    def resizing(self) -> str:
        if self.resized_from is None:
            return ""
        old, new = (f"{height} × {width}" for height, width in (self.resized_from, self.image_shape))
        how = f", position embeddings resampled by {self.interpolation}'s algorithm" if self.interpolation else ""
        return f"resized from {old} to {new} pixels{how}"

    @property
    def description(self) -> str:
        return self.architecture

    @property
    def misfit_hint(self) -> str:
        return (
            "type --model, --model-args and --image-size with the values of training, so that timm builds the same "
            "model; if pos_embed has another shape, the image size or the patch size is wrong; if norm or fc_norm is "
            "missing or unknown, global_pool in --model-args is wrong; if training changed layers of the network, or "
            "put it inside another, type --model FILE.py:CLASS with a class that builds it as training did"
        )

    @property
    def first_heads(self) -> int | None:
        heads = self.model_args.get("num_heads")
        return heads[0] if isinstance(heads, list) else heads
