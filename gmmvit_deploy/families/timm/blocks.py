"""The blocks of a network of timm, whose outputs ``gmmvit parity --localize`` compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.layers.fused_call import AnsweredAttention

if TYPE_CHECKING:
    from gmmvit_deploy.families.timm.spec import TimmSpec

__all__ = ["block_names"]


def block_names(spec: TimmSpec) -> tuple[str, ...]:
    """Return the modules that hold an answered attention, in execution order; without attentions, the feature stages.

    timm registers its blocks in execution order. Windows of a block that runs inside another block are not listed.
    """
    import torch

    from gmmvit_deploy.families.timm.model import TimmModel

    with torch.device("meta"):
        model = TimmModel(spec)
    names: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, AnsweredAttention):
            block = path.rpartition(".")[0].rpartition(".")[0]
            if block not in names and block not in ("", "network"):
                names.append(block)
    if names:
        return tuple(names)
    stages = [str(info["module"]) for info in getattr(model.network, "feature_info", ()) if info.get("module")]
    known = dict(model.network.named_modules())
    return tuple(dict.fromkeys(f"network.{stage}" for stage in stages if stage in known))
