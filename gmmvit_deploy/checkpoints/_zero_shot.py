"""Compute the classifier of a CLIP or SigLIP from the texts of its classes, as transformers computes the logits.

    t_c = n(mean over the prompts p of n(text(p with the label of class c)))        n(x) = x / |x|
    logits_c = exp(logit_scale) · t_c · n(image) + logit_bias = W n(image) + b      CLIP has no bias

Several prompts are averaged as CLIP's authors average them. Everything is computed in float64; W is rounded once. The
proof compares the model with ``logits_per_image`` l_cp of transformers' whole model for the text of each prompt:

    logits_c = (mean over p of l_cp − b) / |mean over p of n(text_cp)| + b
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.checkpoints.reading import TensorFile
from gmmvit_deploy.errors import CheckpointError, InputError
from gmmvit_deploy.models.families.hugging_face.checkpoint import CONFIG_FILE
from gmmvit_deploy.models.families.hugging_face.network import (
    class_named,
    config_of,
    of_images_and_texts,
    translated_names,
)
from gmmvit_deploy.models.sources.hints import LoadHints

if TYPE_CHECKING:
    from torch import Tensor

    from gmmvit_deploy.models.layers.model import Model

_TOKENIZERS = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
_TEXTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ZeroShotProof:
    """The float64 logits that transformers' own model computes for two random images.

    images: (2, c, height, width).  logits: (2, C).  limit: the largest difference that the rounding of W explains.
    """

    images: Tensor
    logits: Tensor
    limit: float

    def require_equal_logits(self, model: Model, *, source: str) -> None:
        """Errors: CheckpointError when the model gives other logits."""
        import torch

        with torch.no_grad():
            largest = float((copy.deepcopy(model).double()(self.images) - self.logits).abs().max())
        if not largest <= self.limit:
            raise CheckpointError(
                f"{source}: the logits differ by {largest:.3g} (limit {self.limit:.3g}) from logits_per_image of "
                "transformers' own model; this is a defect of gmmvit-deploy, please report it with the name of the "
                "architecture"
            )


def refuse_prompts(file: TensorFile) -> None:
    """Errors: CheckpointError when the file has no network of images and texts."""
    config = file.record.config
    if not of_images_and_texts(config):
        raise CheckpointError(
            f"{file.path}: --prompt: expected a folder of Hugging Face transformers with the class CLIPModel or "
            f"SiglipModel, whose text tower turns labels into classes, got {config.get('architectures', 'none')}",
            hint="leave --prompt out; of a CLIP or SigLIP, give the folder with config.json, weights and tokenizer",
        )


def with_text_classes(file: TensorFile, hints: LoadHints) -> tuple[TensorFile, ZeroShotProof]:
    """Return the file with ``classifier.weight`` (C, D) and ``classifier.bias`` (C) in place of the text tower.

    Errors: CheckpointError when the folder has no text tower or no tokenizer, or when a text is too long.
    """
    import torch

    from gmmvit_deploy.models.families.hugging_face.towers import TENSORS

    folder = file.path if file.path.is_dir() else file.path.parent
    network, names = _whole_network(file, folder)
    tokens = _tokens(network.config, folder, hints)
    images_config = network.config.vision_config
    shape = (2, images_config.num_channels, images_config.image_size, images_config.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    texts, logits = _embedded(network, tokens, images)
    counts = (len(hints.prompts), len(hints.labels))
    mean = texts.unflatten(0, counts).mean(0)  # (C, D)
    length = mean.norm(dim=-1, keepdim=True)
    scale = network.logit_scale.exp().reshape(())
    bias = getattr(network, "logit_bias", torch.zeros(1, dtype=torch.float64)).reshape(())
    expected = (logits.unflatten(1, counts).mean(1) - bias) / length.T + bias
    classifier = {
        "classifier.weight": (scale * mean / length).float(),
        "classifier.bias": bias.expand(len(mean)).float(),
    }
    # |δW n(x)| ≤ |δW| ≤ 2⁻²⁴ |W| = 2⁻²⁴ exp(logit_scale); twice, for float64 and subnormal numbers.
    proof = ZeroShotProof(images, expected, float(2**-23 * (scale + bias.abs())))
    kept = {name: tensor.float() for name, tensor in network.state_dict().items() if name.startswith(TENSORS)}
    reason = "read once, at export: the classifier holds what the text tower and the scale give"
    left_out = {old: reason for old, new in names.items() if new not in kept}
    words = f"{file.wrapping}; classes from {counts[1]} labels and {counts[0]} prompts"
    return replace(file, tensors=kept | classifier, wrapping=words, left_out={**file.left_out, **left_out}), proof


def _whole_network(file: TensorFile, folder: Path) -> tuple[Any, Mapping[str, str | None]]:
    """Return (transformers' model of images and texts in float64, name in the file → name in the model)."""
    where, config = f"{folder}/{CONFIG_FILE}", file.record.config
    (architecture,) = config["architectures"]
    network = class_named(architecture, where=where)(config_of(architecture, config, where=where)).eval()
    names = translated_names(network, file.tensors)
    tensors = {new: file.tensors[old] for old, new in names.items() if new is not None}
    missing = [name for name in network.state_dict() if name not in tensors]
    if texts := [name for name in missing if not name.startswith("vision_model.")]:
        raise CheckpointError(
            f"{folder}: the folder has no text tower: the tensor {texts[0]} of {architecture} is missing",
            hint="give the folder with all weights of the model, as save_pretrained wrote it",
        )
    try:
        network.load_state_dict(tensors)
    except RuntimeError as exc:
        raise CheckpointError(
            f"{folder}: the tensors do not fit {architecture}: {' '.join(str(exc).split())}",
            hint=f"copy or download {CONFIG_FILE} and the weights again",
        ) from exc
    return network.double().requires_grad_(False), names


def _tokens(config: Any, folder: Path, hints: LoadHints) -> Mapping[str, Tensor]:
    """Return what the tokenizer of the folder makes of each label in each prompt: name → (P · C, length)."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(
            f"{folder}: the folder has no tokenizer, which --prompt needs; expected one of the files "
            f"{', '.join(_TOKENIZERS)}",
            hint='copy the files of the tokenizer into the folder, or type python -c "import transformers as t; '
            f"t.AutoTokenizer.from_pretrained('OWNER/NAME').save_pretrained('{folder}')\" with the name on the hub",
        )
    texts = [prompt.replace("{}", label) for prompt in hints.prompts for label in hints.labels]
    longest = int(config.text_config.max_position_embeddings)
    # SigLIP was trained with texts padded to the whole length; transformers' own pipeline does the same.
    padding = {"padding": "max_length", "max_length": longest} if config.model_type == "siglip" else {"padding": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        lengths = [len(row) for row in tokenizer(texts)["input_ids"]]
        fits = max(lengths) <= longest
        tokens: Mapping[str, Tensor] = tokenizer(texts, return_tensors="pt", **padding) if fits else {}
    except ImportError as exc:
        raise InputError(
            f"{folder}: the tokenizer needs a package that is not installed: {' '.join(str(exc).split())}",
            hint="pip install sentencepiece protobuf",
        ) from exc
    # The files come from elsewhere; transformers and tokenizers raise exceptions of several libraries.
    except Exception as exc:
        raise CheckpointError(
            f"{folder}: transformers cannot read the tokenizer: {type(exc).__name__}: {' '.join(str(exc).split())}",
            hint="copy or download the files of the tokenizer again",
        ) from exc
    if not fits:
        text = texts[lengths.index(max(lengths))]
        raise InputError(
            f"the text {text!r} has {max(lengths)} tokens, and the text tower reads at most {longest}",
            hint="shorten the label or the prompt",
        )
    return {name: tokens[name] for name in ("input_ids", "attention_mask") if name in tokens}


def _embedded(network: Any, tokens: Mapping[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the normalised embeddings of the texts (T, D), logits_per_image (2, T)) of transformers' own model."""
    import torch

    texts, logits = [], []
    with torch.inference_mode():
        for first in range(0, len(tokens["input_ids"]), _TEXTS_AT_ONCE):
            rows = {name: each[first : first + _TEXTS_AT_ONCE] for name, each in tokens.items()}
            output = network(pixel_values=images, **rows)
            texts.append(output.text_embeds)
            logits.append(output.logits_per_image)
    return torch.cat(texts), torch.cat(logits, dim=1)
