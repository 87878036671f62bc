"""Small model folders that Hugging Face transformers itself writes, with random weights, for tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers

from tests.uneven_attention import perturbed

transformers.utils.logging.disable_progress_bar()
_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_DINO = {name: value for name, value in _VIT.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 32,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "mlp_ratio": 2.0,
}
_TEXT = {name: _VIT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
_SQUARE = {"size": {"height": 32, "width": 32}}
_SHORTEST = {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 32}}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", _VIT, "ViTImageProcessor", _SQUARE),
    "deit": (
        "DeiTForImageClassification",
        _VIT,
        "DeiTImageProcessor",
        {"size": {"height": 36, "width": 36}, "crop_size": {"height": 32, "width": 32}},
    ),
    "deit_with_teacher": ("DeiTForImageClassificationWithTeacher", _VIT, "ViTImageProcessor", _SQUARE),
    "beit": (
        "BeitForImageClassification",
        {**_VIT, "use_relative_position_bias": True, "layer_scale_init_value": 0.1},
        "BeitImageProcessor",
        _SQUARE,
    ),
    "swin": ("SwinForImageClassification", _SWIN, "ViTImageProcessor", {**_SQUARE, "resample": 3}),
    "swinv2": (
        "Swinv2ForImageClassification",
        _SWIN,
        "ConvNextImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_pct": 0.875},
    ),
    "dinov2": ("Dinov2ForImageClassification", _DINO, "BitImageProcessor", _SHORTEST),
    "dinov2_at_another_size": (
        "Dinov2ForImageClassification",
        {**_DINO, "image_size": 56},
        "BitImageProcessor",
        _SHORTEST,
    ),
    "dinov2_registers": ("Dinov2WithRegistersForImageClassification", _DINO, "BitImageProcessor", _SHORTEST),
    "vit_msn": ("ViTMSNForImageClassification", _VIT, "ViTImageProcessor", _SQUARE),
    "clip": ("CLIPForImageClassification", {"vision_config": _VIT, "text_config": _TEXT}, "ViTImageProcessor", _SQUARE),
    "siglip": (
        "SiglipForImageClassification",
        {"vision_config": _VIT, "text_config": _TEXT},
        "SiglipImageProcessor",
        _SQUARE,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        "ConvNextImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_pct": 0.875},
    ),
    "resnet": ("ResNetForImageClassification", _RESNET, "ViTImageProcessor", _SQUARE),
}
"""Name of a test folder → (class of the model, fields of the configuration, image processor, its fields)."""
BACKBONES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "vit_backbone": ("ViTModel", _VIT, "ViTImageProcessor", _SQUARE),
    "vit_msn_backbone": ("ViTMSNModel", _VIT, "ViTImageProcessor", _SQUARE),
    "swin_backbone": ("SwinModel", _SWIN, "ViTImageProcessor", _SQUARE),
    "ijepa_backbone": ("IJepaModel", _VIT, "ViTImageProcessor", _SQUARE),
    "resnet_backbone": ("ResNetModel", _RESNET, "ViTImageProcessor", _SQUARE),
    "dinov3_backbone": (
        "DINOv3ViTModel",
        {**_VIT, "num_register_tokens": 2},
        "DINOv3ViTImageProcessor",
        {"size": {"height": 32, "width": 32}, "resample": 2},
    ),
    "dinov3_gated_backbone": (
        "DINOv3ViTModel",
        {**_VIT, "num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"},
        "DINOv3ViTImageProcessor",
        {"size": {"height": 32, "width": 32}, "resample": 2},
    ),
    "clip_backbone": ("CLIPVisionModel", _VIT, "CLIPImageProcessor", _SHORTEST),
    "clip_projected": (
        "CLIPVisionModelWithProjection",
        {**_VIT, "projection_dim": 16},
        "CLIPImageProcessor",
        _SHORTEST,
    ),
    "siglip_backbone": ("SiglipVisionModel", _VIT, "SiglipImageProcessor", _SQUARE),
    "dinov2_registers_backbone": ("Dinov2WithRegistersModel", _DINO, "BitImageProcessor", _SHORTEST),
    "dinov2_backbone": ("Dinov2Model", {**_DINO, "image_size": 56}, "BitImageProcessor", _SHORTEST),
}
"""The same for networks without a classifier."""
_LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
_CLIP_TOKENS = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
_GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *_LETTERS]


def _text_tower(tokens: list[str], **special: int) -> dict[str, Any]:
    return {**_TEXT, "vocab_size": len(tokens), "max_position_embeddings": 40, **special}


IMAGES_AND_TEXTS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "clip_model": (
        "CLIPModel",
        {
            "vision_config": _VIT,
            "text_config": _text_tower(_CLIP_TOKENS, bos_token_id=0, eos_token_id=1, pad_token_id=1),
            "projection_dim": 16,
        },
        "CLIPImageProcessor",
        _SHORTEST,
    ),
    "siglip_model": (
        "SiglipModel",
        {
            "vision_config": _VIT,
            "text_config": _text_tower(_GEMMA_TOKENS, bos_token_id=2, eos_token_id=1, pad_token_id=0),
        },
        "SiglipImageProcessor",
        _SQUARE,
    ),
}
"""The same for networks of images and texts, whose tokenizer knows the letters."""
LABELS = ("a cat", "a dog", "a fox", "an owl", "a newt")


_ALL = {**ARCHITECTURES, **BACKBONES, **IMAGES_AND_TEXTS}


def built(name: str, arguments: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Any:
    """Return the model of a test folder, in evaluation mode, with weights that make the attention uneven.

    arguments: those of the class beside the configuration.  fields: more fields of the configuration.
    """
    architecture, sizes, _, _ = _ALL[name]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    model = model_class(model_class.config_class(**{**sizes, **labels, **fields}), **arguments).eval()
    with torch.no_grad():
        perturbed(model)
    return model


def saved(name: str, folder: Path, model: Any = None, **options: Any) -> Path:
    """Write a test folder with ``save_pretrained``.

    model: the model, if it is not that of `built`.  options: arguments of ``save_pretrained`` of the model.
    """
    _, _, processor, fields = _ALL[name]
    (model or built(name)).save_pretrained(folder, **options)
    getattr(transformers, processor)(**fields).save_pretrained(folder)
    if name in IMAGES_AND_TEXTS:
        _tokenizer(name).save_pretrained(folder)
    return folder


def _tokenizer(name: str) -> Any:
    """Return a tokenizer of the letters: that of CLIP, or that of SigLIP 2 of fixed resolution."""
    tokens, kind = {
        "clip_model": (_CLIP_TOKENS, transformers.CLIPTokenizer),
        "siglip_model": (_GEMMA_TOKENS, transformers.GemmaTokenizer),
    }[name]
    return kind(vocab={token: index for index, token in enumerate(tokens)}, merges=[])


def edited(folder: Path, file: str, **changes: Any) -> Path:
    """Change fields of a JSON file of a folder; a value ... removes the field.  Returns the folder."""
    path = folder / file
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    return folder


def processed(folder: Path, image: Any, backend: str = "pil") -> torch.Tensor:
    """Return the tensor (1, c, height, width) that the image processor of the folder makes of a ``PIL.Image``."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    tensor: torch.Tensor = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
    return tensor
