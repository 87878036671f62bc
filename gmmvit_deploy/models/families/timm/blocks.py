"""The blocks of a network of timm, whose outputs ``gmmvit parity --localize`` compares, and the windows of Swin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.models.layers.answered_network import MASK, answered_blocks

if TYPE_CHECKING:
    from gmmvit_deploy.models.families.timm.spec import TimmSpec

__all__ = ["block_names", "windows_of"]


def block_names(spec: TimmSpec) -> tuple[str, ...]:
    """Return the names of the blocks: the modules with an attention whose fused attention call gmmvit has replaced.

    In such an attention, an `AnsweredAttention` computes the result of the call. If the network has no such attention,
    return the names of timm's feature stages. The order of the names is that of registration, which in timm is the
    order of execution.
    """
    import torch

    from gmmvit_deploy.models.families.timm.model import TimmModel

    with torch.device("meta"):
        model = TimmModel(spec)
    names = answered_blocks(model)
    if names:
        return names
    stages = [str(info["module"]) for info in getattr(model.network, "feature_info", ()) if info.get("module")]
    known = dict(model.network.named_modules())
    return tuple(dict.fromkeys(f"network.{stage}" for stage in stages if stage in known))


def windows_of(spec: TimmSpec) -> Mapping[str, Windows]:
    """Return a dict from the name of a `MaskedAttention` to its windows, for attentions in Swin's square windows."""
    import torch

    from gmmvit_deploy.models.families.timm.model import TimmModel

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
