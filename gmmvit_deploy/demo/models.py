"""The models that the demo trains: this project's ViT (`OwnModel`), or a classifier of timm (`demo._timm_model`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn

from gmmvit_deploy.checkpoints.loading import released_state_dict
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskKind, MaskSpec, ModelSpec
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.training.images import TrainingData
from gmmvit_deploy.training.recipe import RECIPES
from gmmvit_deploy.training.trainer import Epoch, Trainer

Network = TypeVar("Network", bound=nn.Module)

IMAGE_SIZE = 32
_SEED = 7
_KERNELS = 5

DIGITS_SPEC: ModelSpec = ViTSpec(
    image_size=IMAGE_SIZE,
    patch_size=4,
    classes=10,
    dim=64,
    depth=4,
    heads=4,
    head_dim=16,
    mlp_dim=128,
    class_token=False,
    mask=MaskSpec(kind="gmm", kernels=_KERNELS),
)


class DemoModel(ABC, Generic[Network]):
    """A model for the digits: how it is built, which images it takes, how it is saved.

    checkpoint: the name of the file or the folder that `save` writes.
    image: the images that the model takes.  png: those that the demo writes, before the resize rule of ``image``.
    typed_hints, typed_options: ``hints`` and ``export_options`` as options of the command line, each after a space.
    every_attention_fused: True if the demo fails when TensorRT does not fuse an attention to a single kernel.
    """

    title: str
    epochs: ClassVar[int]
    checkpoint: str
    image: ImageSpec
    png: ImageSpec
    hints: LoadHints
    export_options: ExportOptions
    typed_hints: str = ""
    typed_options: str = ""
    every_attention_fused: bool

    @abstractmethod
    def build(self) -> Network:
        """Build the network with random weights."""

    @abstractmethod
    def save(self, network: Network, path: Path, *, epoch: int) -> None:
        """Write the trained network to ``path``.  epoch: the number of epochs of the training."""


class OwnModel(DemoModel[Model]):
    """The model of `DIGITS_SPEC`, with the mask plain, gmm or elm.  Errors: InputError for another mask."""

    epochs: ClassVar[int] = 24

    def __init__(self, mask: MaskKind = "gmm") -> None:
        kinds = type(DIGITS_SPEC).mask_kinds
        if mask not in kinds:
            raise InputError(
                f"--mask: expected one of {', '.join(kinds)} for the demo's own ViT, got {mask}",
                hint=f"add --model test_vit to train a model of timm with the mask {mask}",
            )
        digits = DATASETS["digits"]
        self.spec = replace(DIGITS_SPEC, mask=MaskSpec(kind=mask, kernels=_KERNELS if mask == "gmm" else 0))
        self.title = "GMM-ViT" if mask == "gmm" else f"ViT with the mask {mask}"
        self.checkpoint = "checkpoint.pth"
        self.image = self.png = ImageSpec(
            height=IMAGE_SIZE, width=IMAGE_SIZE, channels=DIGITS_SPEC.channels, mean=digits.mean, std=digits.std
        )
        self.export_options = ExportOptions(mean=digits.mean, std=digits.std, labels=digits.labels)
        self.typed_options = " --dataset digits"
        self.every_attention_fused = True
        self.hints = LoadHints()
        if mask != "gmm":  # only the tensors of a Gaussian mixture show the number of heads
            self.hints = LoadHints(heads=DIGITS_SPEC.first_heads)
            self.typed_hints = f" --set heads={DIGITS_SPEC.first_heads}"

    def build(self) -> Model:
        return model_from_spec(self.spec)

    def save(self, network: Model, path: Path, *, epoch: int) -> None:
        save_checkpoint(network, path, epoch=epoch)


def train(model: DemoModel[Network], images: Images, *, epochs: int, on_progress: OnProgress = ignore) -> Network:
    """Train a model by the recipe ``light`` of ``gmmvit train``, and return it in evaluation mode."""
    torch.manual_seed(_SEED)
    network = model.build().train()
    data = TrainingData(train=images, test=None, image=model.image, labels=images.classes)
    trainer = Trainer(network, data, replace(RECIPES["light"], epochs=epochs), seed=_SEED)
    for record in trainer.run():
        if isinstance(record, Epoch):
            on_progress(Progress("train", record.epoch, epochs, f"loss {record.loss:.3f}"))
    return network.eval()


def save_checkpoint(model: Model, path: Path, *, epoch: int) -> None:
    """Write a checkpoint as the released code of "Toward a Deeper Understanding: RetNet Viewed through Convolution"."""
    state = released_state_dict(model)
    if model.spec.mask.kind == "gmm":
        # The paper authors' released code stores an unused copy of the base mask under the additional key ``mask``.
        bases = [tensor for name, tensor in state.items() if name.endswith(".mask.mask")]
        state = {"mask": bases[0], **state}
    torch.save({"model_state_dict": state, "epoch": epoch}, path)
