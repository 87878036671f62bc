"""Spec of a model that Hugging Face transformers builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gmmvit_deploy.models.specs import ModelSpec, plain_json, require, require_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSpec(ModelSpec):
    """A model that the class ``architecture`` of transformers builds from a configuration.

    architecture: the name of the class, such as ``ViTForImageClassification``.
    config: the fields of ``config.json`` that describe the network, as JSON values; the defaults of transformers apply
    to all other fields.
    image_width: the width of the images in pixels if it differs from the height, which is ``image_size``. The size is
    that after the preprocessing, which can differ from ``image_size`` of ``config``.
    pool: the features of a backbone, whose spec has 0 classes: ``cls``, the class token of ``last_hidden_state``; or
    ``pooler`` or "", transformers' ``pooler_output``. It is "" if the user did not choose, and for a classifier.
    head_features: D of the linear layer of ``--head`` behind the features of a backbone; 0 without one.
    prompts: of a network of images and texts, such as ``CLIPModel``, the prompts whose texts became its classes.
    bgr: True if the network was trained with the channels in the order blue, green, red. Images are RGB everywhere: the
    model reverses the channels.
    """

    family: ClassVar[str] = "hugging_face"
    headless: ClassVar[bool] = True
    flags: ClassVar[tuple[str, ...]] = ("pool", "head_features", "prompts", "bgr")
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    image_width: int | None = None
    pool: str = ""
    head_features: int = 0
    prompts: tuple[str, ...] = ()
    bgr: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require(self.mask.kind == "plain", "a model of Hugging Face transformers has no mask that this project knows")
        require(bool(self.architecture), "architecture: expected a class of transformers, got an empty name")
        object.__setattr__(self, "config", plain_json(self.config, "config"))
        require(self.pool in ("", "cls", "pooler"), f"pool: expected cls or pooler, got {self.pool!r}")
        require(not self.bgr or self.channels == 3, "bgr: expected 3 channels")
        own = self.classes and not self.head_features
        require(not (self.pool and own), "pool: the classifier of a network determines what it reads")
        require(not self.head_features or self.classes > 0, "head_features: expected a network with classes")
        if self.image_width is not None:
            require_counts(self, "image_width")

    @property
    def description(self) -> str:
        return self.architecture

    @property
    def misfit_hint(self) -> str:
        return (
            "give the folder as save_pretrained wrote it: the weights, config.json and preprocessor_config.json must "
            "be those of the same model; if position_embeddings has another shape, image_size or patch_size in "
            "config.json is wrong; if the folder comes from elsewhere, copy or download it again"
        )

    @property
    def first_heads(self) -> int | None:
        config = self.config.get("vision_config") or self.config  # CLIP has a network of texts beside that of images
        heads = config.get("num_attention_heads", config.get("num_heads"))
        first = heads[0] if isinstance(heads, list) and heads else heads
        return first if isinstance(first, int) else None
