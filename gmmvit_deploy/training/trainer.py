"""`Trainer`: the training loop.

for pixels, classes in batches:  loss = mean of −Σ_c target[c] · log softmax(network(mixed pixels))[c]
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gmmvit_deploy.errors import GmmvitError, ImageError, InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.models.layers.masked_attention import MaskedAttention
from gmmvit_deploy.models.scores.masks import Mask
from gmmvit_deploy.runtimes.runners.eager import limit_torch
from gmmvit_deploy.training._batches import Batches, seed_everything
from gmmvit_deploy.training.images import Batch, LabelledTensors, TrainingData, collated
from gmmvit_deploy.training.processes import Processes
from gmmvit_deploy.training.recipe import Recipe

_TEST_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A finished step.  step, epoch: counted from 1.  loss: the mean over the images.  rate: the learning rate."""

    step: int
    epoch: int
    loss: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Step):
    """A finished epoch.  loss: the mean over its steps.

    accuracy: the share of correctly classified test images, with the weights to export; None without test images.
    """

    accuracy: float | None


class Trainer:
    """Trains a network.

    network: with random weights, in training mode; trained in place.
    workers: the number of processes that decode and augment images, beside each process of the run.
    Errors: InputError when the batch or the augmentations do not fit the data; MissingDependencyError.
    """

    def __init__(
        self,
        network: nn.Module,
        data: TrainingData,
        recipe: Recipe,
        *,
        seed: int,
        processes: Processes | None = None,
        workers: int = 0,
    ) -> None:
        timm = require("timm", package="timm", extra="train")
        for module in ("loss", "optim", "scheduler", "utils"):
            require(f"timm.{module}", package="timm", extra="train")
        limit_torch()
        self._data, self._recipe, self._seed, self._workers = data, recipe, seed, workers
        self._processes = processes or Processes()
        self._batches = Batches(
            len(data.train), recipe, seed=seed, rank=self._processes.rank, processes=self._processes.size
        )
        self._images = LabelledTensors(data.train, data.image, recipe)
        self.network = network.to(self._processes.device)
        self.average = timm.utils.ModelEmaV3(network, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        self._optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(
            _groups(network, recipe), opt="adamw", lr=recipe.rate, weight_decay=recipe.weight_decay
        )
        warm = min(round(recipe.warmup * self.total_steps), self.total_steps - 1)
        self._schedule = timm.scheduler.CosineLRScheduler(
            self._optimizer,
            t_initial=self.total_steps - warm,
            lr_min=recipe.min_rate,
            warmup_t=warm,
            warmup_lr_init=recipe.min_rate,
            warmup_prefix=True,
            t_in_epochs=False,
        )
        self._mix = timm.data.Mixup(
            mixup_alpha=1.0,
            cutmix_alpha=1.0,
            prob=recipe.mixing,
            switch_prob=0.5,
            label_smoothing=recipe.smoothing,
            num_classes=len(data.labels),
        )
        self._criterion = timm.loss.SoftTargetCrossEntropy()
        self.step, self._losses = 0, 0.0

    @property
    def steps_of_epoch(self) -> int:
        return self._batches.steps

    @property
    def total_steps(self) -> int:
        return self._recipe.epochs * self._batches.steps

    @property
    def trained(self) -> nn.Module:
        """The network with the weights to export: the average if there is an average."""
        module: nn.Module = self.network if self.average is None else self.average.module
        return module

    def run(self) -> Iterator[Step]:
        """Train to the end, and yield every finished step and epoch.  `state` between two of them resumes the run.

        Errors: ImageError when an image cannot be decoded; GmmvitError when the loss is not finite.
        """
        processes, device = self._processes, self._processes.device
        self._batches.first = self.step
        shared = processes.shared(self.network, unused=processes.size > 1 and self._has_unused())
        loader = self._loader(self._images, self._batches)
        for batch in loader:
            pixels, classes = (part.to(device, non_blocking=True) for part in _decoded(batch))
            seed_everything(self._seed, self.step, processes.rank)
            self._schedule.step_update(self.step)
            pixels, targets = self._mix(pixels, classes)
            loss = self._criterion(shared(pixels), targets)
            self._optimizer.zero_grad()
            loss.backward()
            if self._recipe.clip:
                nn.utils.clip_grad_norm_(self.network.parameters(), self._recipe.clip)
            self._optimizer.step()
            self.step += 1
            if self.average is not None:
                self.average.update(self.network, step=self.step)
            mean = float(processes.total(loss.detach())) / processes.size
            yield self._finished_step(mean)
            if self.step % self.steps_of_epoch == 0:
                yield self._finished_epoch()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs beside the weights of the network and of the average."""
        return {"optimizer": self._optimizer.state_dict(), "step": self.step, "losses": self._losses}

    def restore(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._losses = state["step"], state["losses"]

    def _finished_step(self, loss: float) -> Step:
        if not math.isfinite(loss):
            raise GmmvitError(
                f"the loss of step {self.step} is {loss}: the training diverged",
                hint="type a smaller --rate, and --force to start again",
            )
        self._losses += loss
        return Step(step=self.step, epoch=-(-self.step // self.steps_of_epoch), loss=loss, rate=self._rate())

    def _finished_epoch(self) -> Epoch:
        mean, self._losses = self._losses / self.steps_of_epoch, 0.0
        accuracy = None if self._data.test is None else self._accuracy(self._data.test)
        return Epoch(
            step=self.step, epoch=self.step // self.steps_of_epoch, loss=mean, rate=self._rate(), accuracy=accuracy
        )

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def _accuracy(self, test: Images) -> float:
        model, processes = self.trained.eval(), self._processes
        indices = range(processes.rank, len(test), processes.size)
        batches = [
            [(index, 0) for index in indices[at : at + _TEST_BATCH]] for at in range(0, len(indices), _TEST_BATCH)
        ]
        correct = torch.zeros(1, device=processes.device)
        for batch in self._loader(LabelledTensors(test, self._data.image), batches):
            pixels, classes = (part.to(processes.device) for part in _decoded(batch))
            correct += (model(pixels).argmax(dim=1) == classes).sum()
        self.network.train()
        return float(processes.total(correct)) / len(test)

    def _loader(self, images: LabelledTensors, batches: Any) -> DataLoader[Any]:
        pinned = self._processes.device.type == "cuda"
        return DataLoader(
            images, batch_sampler=batches, num_workers=self._workers, collate_fn=collated, pin_memory=pinned
        )

    def _has_unused(self) -> bool:
        """Return True if parameters get no gradient, such as tensors that the released code stores and never reads."""
        copied = copy.deepcopy(self.network)  # the statistics of BatchNorm change
        copied(torch.zeros(2, *self._data.image.tensor_shape, device=self._processes.device)).sum().backward()
        return any(parameter.grad is None for parameter in copied.parameters())


def _decoded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, ImageError):
        raise InputError(str(batch), hint="remove or replace the image, and start again with --force") from batch
    return batch


def _groups(network: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the parameters of the optimiser: all with weight decay, as in the released code, or all but the masks'."""
    masks = [
        parameter
        for module in network.modules()
        if isinstance(module, Mask | MaskedAttention)  # the latter holds the mask on an attention of timm
        for parameter in module.parameters(recurse=False)
    ]
    if recipe.decays_masks or not masks:
        return [{"params": list(network.parameters())}]
    held = {id(parameter) for parameter in masks}
    others = [parameter for parameter in network.parameters() if id(parameter) not in held]
    return [{"params": others}, {"params": masks, "weight_decay": 0.0}]
