"""A network without classifier under a prefix, and what stands beside it.

    encoder.cls_token, encoder.blocks.0.…, head.weight, head.bias  ->  cls_token, blocks.0.…, head.weight, head.bias

A class of the user's own often holds a network of a library as ``self.encoder`` and its classifier as ``self.head``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from gmmvit_deploy.checkpoints._wrapping import CLASSIFIER, of_training
from gmmvit_deploy.checkpoints.reading import TensorFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """prefix: of the network, such as ``encoder.``.  beside: name → shape of the tensors without the prefix, but those
    of losses and metrics.

    layer: the name of the linear layer that is all of ``beside``, such as ``head``; empty if ``beside`` is more.
    file: the tensors without the prefix; the linear layer is ``head``, a name of a classifier.
    """

    prefix: str
    beside: dict[str, tuple[int, ...]]
    layer: str
    file: TensorFile


def backbone_of(file: TensorFile) -> Backbone | None:
    """Return the part with most of the tensors, if it has a prefix and no classifier, and tensors are beside it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items() if not of_training(name)}
    outer = _common(shapes)
    parts = Counter(name.removeprefix(outer).partition(".")[0] for name in shapes)
    largest = max(parts, key=lambda part: parts[part], default="")
    if 2 * parts[largest] <= len(shapes):
        return None
    prefix = _common(name for name in shapes if name.startswith(f"{outer}{largest}."))
    names = {name: name.removeprefix(prefix) for name in file.tensors}
    beside = {name: shape for name, shape in shapes.items() if not name.startswith(prefix)}
    if not beside or any(CLASSIFIER.fullmatch(names[name]) for name in names.keys() - beside.keys()):
        return None
    weights = [name for name, shape in beside.items() if name.endswith(".weight") and len(shape) == 2]
    layer = weights[0].removesuffix(".weight") if len(weights) == 1 else ""
    if beside.keys() != {f"{layer}.weight", f"{layer}.bias"}:
        layer = ""
    names |= {f"{layer}.{part}": f"head.{part}" for part in ("weight", "bias")} if layer else {}
    words = f"network under '{prefix}'" + (f", its classifier {layer} beside it" if layer else "")
    tensors = {names[name]: tensor for name, tensor in file.tensors.items()}
    joined = replace(file, tensors=tensors, wrapping=f"{file.wrapping}, {words}")
    return Backbone(prefix=prefix, beside=beside, layer=layer, file=joined)


def _common(names: Iterable[str]) -> str:
    """Return the longest prefix of whole parts, such as ``net.encoder.``, that all names have."""
    parts = [name.split(".")[:-1] for name in names]
    common = takewhile(lambda level: len({*level}) == 1, zip(*parts, strict=False))
    return "".join(f"{level[0]}." for level in common)
