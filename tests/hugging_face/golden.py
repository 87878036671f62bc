"""The golden folders of transformers' models, with random weights, and the logits that transformers 5.23 computed.

``python -m tests.hugging_face.golden`` writes what is missing of ``tests/golden/hugging_face``:

    NAME/       the folder as ``save_pretrained`` writes it
    NAME.npz    images (4, 3, 32, 32), float32; logits (4, C), of transformers in float64
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.hugging_face.folders import IMAGES_AND_TEXTS, saved, transformers

FOLDER = Path(__file__).parent.parent / "golden" / "hugging_face"
TEXTS: dict[str, Any] = {"labels": ("cat", "dog", "fox", "great owl"), "prompts": ("a photo of a {}",)}


@dataclass(frozen=True)
class Case:
    """model: the name of a test folder.  hints: arguments of `LoadHints`.  atol: what rounding explains."""

    model: str
    hints: dict[str, Any] = field(default_factory=dict)
    atol: float = 1e-9


CASES = {
    "vit": Case("vit"),
    "clip_classifier": Case("clip"),
    "deit_with_teacher": Case("deit_with_teacher"),
    "dinov2_registers": Case("dinov2_registers"),
    "dinov3_head": Case("dinov3_backbone", {"head": str(FOLDER / "dinov3_head" / "head.npz")}, atol=1e-5),
    "clip": Case("clip_model", TEXTS, atol=1e-5),
    "siglip": Case("siglip_model", TEXTS, atol=1e-5),
}
"""Name of a golden folder → what it is.  The head of DINOv3 and the text embeddings are rounded to float32. SigLIP 2 of
fixed resolution is ``SiglipModel`` too, with another tokenizer."""


@torch.no_grad()
def _logits(name: str, images: torch.Tensor) -> torch.Tensor:
    """Return what transformers computes in float64 from a golden folder."""
    folder, case = FOLDER / name, CASES[name]
    if case.model in IMAGES_AND_TEXTS:
        network = transformers.AutoModel.from_pretrained(folder).double().eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts = [prompt.format(label) for prompt in TEXTS["prompts"] for label in TEXTS["labels"]]
        padding = {"padding": True} if name == "clip" else {"padding": "max_length", "max_length": 40}
        tokens = tokenizer(texts, return_tensors="pt", **padding)
        output = network(pixel_values=images, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        logits: torch.Tensor = output.logits_per_image
        return logits
    if name == "dinov3_head":
        features = transformers.AutoModel.from_pretrained(folder).double().eval()(images).pooler_output
        head = np.load(folder / "head.npz")
        return nn.functional.linear(features, torch.from_numpy(head["coef_"]), torch.from_numpy(head["intercept_"]))
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    network = getattr(transformers, architecture).from_pretrained(folder).double().eval()
    classified: torch.Tensor = network(images).logits
    return classified


def write() -> None:
    for name, case in CASES.items():
        if (FOLDER / f"{name}.npz").exists():
            continue
        folder = saved(case.model, FOLDER / name)
        generator = np.random.default_rng(0)
        if name == "dinov3_head":
            np.savez(folder / "head.npz", coef_=generator.standard_normal((4, 32)), intercept_=np.arange(4.0))
        images = generator.standard_normal((4, 3, 32, 32)).astype(np.float32)
        logits = _logits(name, torch.from_numpy(images).double())
        np.savez_compressed(FOLDER / f"{name}.npz", images=images, logits=logits.numpy())


if __name__ == "__main__":
    write()
