"""A model of timm as a `Model` of this package.

    logits = network(images)        network: the module that timm builds (`layers.answered_network`)
    logits = head(tokens)           with a linear head of DINO (`LinearHead`); the tokens are the features
    features = network(images)      without a classifier, as timm builds a network with num_classes 0
    features = network.forward_head(network.forward_features(images), pre_logits=True)      with a classifier

The masks of the spec are on the attentions that `gmmvit_deploy.timm.add_masks` would choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.models.families.timm.network import network_from_spec
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.layers.answered_network import MASK, AnsweredNetwork, answered_blocks
from gmmvit_deploy.models.layers.fused_call import use_fused_calls
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.layers.token_grids import placements
from gmmvit_deploy.models.specs import MEAN_OF_TOKENS, input_shape

if TYPE_CHECKING:
    from gmmvit_deploy.models.families.timm.spec import TimmSpec


class LinearHead(nn.Module):
    """The linear classifier with which DINO and DINOv2 evaluate a backbone.

    features = [c of block L−n+1, …, c of block L]    c: the class token after the last norm; n = ``blocks``, L blocks
    features = [features, m]                          with ``average``; m: the mean of the normed patches of block L
    features = c[0], m[0], c[1], m[1], …              with ``interleaved``, as in DINO's eval_linear.py; only for n = 1
    logits = W features + b

    forward: (network, images (B, c, height, width)) → (logits (B, C), features (B, D)).
    """

    operator_roles: ClassVar[dict[str, Any]] = {"mean": "pooling"}

    def __init__(self, dim: int, *, blocks: int, average: bool, interleaved: bool, classes: int) -> None:
        super().__init__()
        self.blocks, self.average, self.interleaved = blocks, average, interleaved
        self.linear = with_role(nn.Linear((blocks + average) * dim, classes), "head")

    @staticmethod
    def for_network(network: Any, *, blocks: int, average: bool, interleaved: bool, classes: int) -> LinearHead:
        """Return a head with random weights.  Errors: SpecError for a network without class token or too few blocks."""
        depth = len(getattr(network, "blocks", ()))
        if not hasattr(network, "get_intermediate_layers") or not getattr(network, "num_prefix_tokens", 0):
            raise SpecError(
                f"a linear head reads class tokens, and {type(network).__name__} has no class token",
                hint="type --model with the architecture of the backbone, a vision transformer with a class token",
            )
        if blocks > depth:
            # The number of features fits already, and with the mean of the patches it also fits one block less.
            raise SpecError(
                f"--set head_blocks={blocks}: the model has {depth} blocks",
                hint=f"type --set head_blocks={depth} --set head_average=yes"
                if blocks == depth + 1 and not average
                else "type --head with the file of the linear head that was trained on this backbone",
            )
        return LinearHead(network.embed_dim, blocks=blocks, average=average, interleaved=interleaved, classes=classes)

    def forward(self, network: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = network.get_intermediate_layers(images, n=self.blocks, return_prefix_tokens=True, norm=True)
        tokens = torch.cat([prefix[:, 0] for _, prefix in outputs], dim=-1)
        if self.average:
            mean = outputs[-1][0].mean(dim=1)
            tokens = (
                torch.stack([tokens, mean], dim=-1).flatten(1) if self.interleaved else torch.cat([tokens, mean], -1)
            )
        return self.linear(tokens), tokens


class TimmModel(AnsweredNetwork):
    """A network of timm: a classifier, or a backbone without a classifier, whose spec has 0 classes."""

    package: ClassVar[str] = "timm"
    spec: TimmSpec

    def __init__(self, spec: TimmSpec) -> None:
        super().__init__(spec)
        if not spec.classes:
            self.outputs = ("features",)
        self.linear_head: nn.Module | None = None
        if spec.head_blocks:
            self.linear_head = LinearHead.for_network(
                self.network,
                blocks=spec.head_blocks,
                average=spec.head_average,
                interleaved=spec.head_interleaved,
                classes=spec.classes,
            )
        use_fused_calls(self.network)
        masked = {} if spec.mask.kind == "plain" else {p.module: p for p in placements(self.network, input_shape(spec))}
        self.answer_calls(masked)

    def built_network(self) -> nn.Module:
        return network_from_spec(self.spec)

    @property
    def pooling(self) -> str:
        if self.spec.head_blocks:
            blocks, patches = self.spec.head_blocks, " and mean of the patches" if self.spec.head_average else ""
            order = ", value by value" if self.spec.head_interleaved else ""
            return f"{super().pooling if blocks == 1 else f'class tokens of the last {blocks} blocks'}{patches}{order}"
        network: Any = self.network
        pool = getattr(network, "global_pool", None) or getattr(getattr(network, "head", None), "global_pool", "")
        kind = str(getattr(pool, "pool_type", pool))
        mean = MEAN_OF_TOKENS if getattr(network, "pool_include_prefix", False) else "mean of the patches"
        words = {"token": super().pooling, "avg": mean, "map": "attention pooling", "max": "largest of the patches"}
        return words.get(kind, f"timm's global_pool {kind}" if kind else "timm's forward_head")

    def logits_and_features(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        network: Any = self.network
        if self.linear_head is not None:
            both: tuple[Tensor, Tensor] = self.linear_head(network, images)
            return both
        if not self.spec.classes:
            return None, network(images)
        if "features" not in self.outputs:
            return network(images), None
        tokens = network.forward_features(images)
        features = network.forward_head(tokens, pre_logits=True)
        return (network.forward_head(tokens) if "logits" in self.outputs else None), features

    def classifier_heads(self) -> Iterator[tuple[str, nn.Linear]]:
        if self.linear_head is not None:
            yield "linear_head.linear", self.linear_head.get_submodule("linear")  # type: ignore[misc]
            return
        get = getattr(self.network, "get_classifier", None)
        heads = () if get is None else get()
        listed = heads if isinstance(heads, tuple | list) else (heads,)
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear) and any(layer is head for head in listed):
                yield name, layer

    def why_no_rollout(self) -> str:
        if self.spec.head_blocks > 1:
            return f"the linear head reads the class tokens of the last {self.spec.head_blocks} blocks"
        if self.spec.head_average:
            return "the linear head reads the class token and the mean of the patches with weights of its own"
        return ""

    def computes_built_network(self) -> bool:
        return super().computes_built_network() and self.linear_head is None


def block_names(spec: TimmSpec) -> tuple[str, ...]:
    """Return the names of the `answered_blocks`, or without any those of timm's feature stages.

    Their order is that of registration, which in timm is the order of execution.
    """
    with torch.device("meta"):
        model = TimmModel(spec)
    names = answered_blocks(model)
    if names:
        return names
    stages = [str(info["module"]) for info in getattr(model.network, "feature_info", ()) if info.get("module")]
    known = dict(model.network.named_modules())
    return tuple(dict.fromkeys(f"network.{stage}" for stage in stages if stage in known))


def windows_of(spec: TimmSpec) -> Mapping[str, Windows]:
    """Return name of a `MaskedAttention` → its windows, for attentions in Swin's square windows."""
    if spec.mask.kind == "plain":
        return {}
    with torch.device("meta"):
        model = TimmModel(spec)
    windows, paths = {}, {path for path, _ in model.named_modules()}
    for path, module in model.named_modules():
        sizes = [getattr(module, name, None) for name in ("input_resolution", "window_size", "shift_size")]
        if f"{path}.attn.{MASK}" not in paths or any(size is None for size in sizes):
            continue
        grid, window, shift = (size if isinstance(size, tuple) else (size, size) for size in sizes)
        if len({*grid}) == len({*window}) == len({*shift}) == 1:
            windows[f"{path}.attn.{MASK}"] = Windows(grid=grid[0], window=window[0], shift=shift[0])
    return windows
