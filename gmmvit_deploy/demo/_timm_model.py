"""A classifier of timm for the digits, with or without masks, saved as timm's users save their models.

    network = gmmvit_deploy.timm.create(architecture, mask=mask, in_chans=1, num_classes=10, img_size=32, patch_size=8)
    timm.models.save_for_hf(network, folder)        model.safetensors, config.json

``config.json`` states the architecture, its arguments, the preprocessing and the labels, so that ``gmmvit export``
needs no option.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from gmmvit_deploy.demo.models import IMAGE_SIZE, DemoModel
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.resize_rules import resize_rule_from_timm
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families.timm.network import architecture_from, require_timm
from gmmvit_deploy.models.families.timm.spec import CONV_STEM_VIT
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskKind
from gmmvit_deploy.timm import create
from gmmvit_deploy.training.networks import timm_arguments

_DIGITS_SIDE = 8  # the height and the width of scikit-learn's digits, in pixels
_CHANNELS = 1
_SIZES: tuple[Mapping[str, Any], ...] = ({"img_size": IMAGE_SIZE, "patch_size": 8}, {"img_size": IMAGE_SIZE}, {})
"""Arguments for small images, in the order of preference.  Not every architecture takes each argument."""


class DemoTimmModel(DemoModel[nn.Module]):
    """A classifier of timm for grey images of 32 × 32 pixels.

    name: of the architecture, with or without ``timm:``.  mask: ``plain`` builds timm's model.
    Errors: MissingDependencyError; InputError for another name, size, interpolation or crop mode.
    """

    # test_vit learns more slowly than this project's ViT, and has a quarter of the tokens, so that an epoch is shorter.
    epochs: ClassVar[int] = 40

    def __init__(self, name: str, mask: MaskKind = "gmm") -> None:
        timm = require_timm()
        self.architecture = architecture_from(name, where="--model")
        if self.architecture == CONV_STEM_VIT:
            raise InputError(
                f"--model: expected the name of an architecture of timm, got {name!r}",
                hint="add --model test_vit, or another name of timm",
            )
        self.mask = mask
        digits = DATASETS["digits"]
        self.title = self.architecture if mask == "plain" else f"{self.architecture} with the mask {mask}"
        self.checkpoint = "model"
        self.labels = digits.labels
        self.data_config: Mapping[str, Any] = timm.data.resolve_data_config(
            {
                "input_size": (_CHANNELS, IMAGE_SIZE, IMAGE_SIZE),
                "mean": digits.mean[:_CHANNELS],
                "std": digits.std[:_CHANNELS],
            },
            pretrained_cfg=timm.get_pretrained_cfg(self.architecture, allow_unregistered=True).to_dict(),
        )
        self.image = ImageSpec(
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            channels=_CHANNELS,
            mean=tuple(self.data_config["mean"]),
            std=tuple(self.data_config["std"]),
            resize=resize_rule_from_timm(self.data_config["crop_mode"], self.data_config["interpolation"]),
            crop_pct=self.data_config["crop_pct"],
        )
        # The files keep the size of the digits, so that a server resizes and crops them as config.json states.
        self.png = ImageSpec(height=_DIGITS_SIDE, width=_DIGITS_SIDE, channels=_CHANNELS)
        self.hints, self.export_options = LoadHints(), ExportOptions()
        self.every_attention_fused = False  # TensorRT has no fused kernel for the attention of some architectures
        required = {"in_chans": _CHANNELS, "num_classes": len(self.labels)}
        self.model_args = timm_arguments(self.architecture, required, IMAGE_SIZE, _SIZES)

    def build(self) -> nn.Module:
        if self.mask != "plain":
            return create(self.architecture, mask=self.mask, **self.model_args)
        network: nn.Module = require_timm().create_model(self.architecture, **self.model_args)
        return network

    def save(self, network: nn.Module, path: Path, *, epoch: int) -> None:
        require_timm().models.save_for_hf(
            network,
            path,
            model_config={"label_names": list(self.labels)},
            model_args=self.model_args,
            data_config=dict(self.data_config),
            safe_serialization=True,
        )
