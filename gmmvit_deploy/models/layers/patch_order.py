"""The order in which the values of a patch are flattened: (row, column, channel), or by mistake (channel, row, column).

The linear layers of this package read patches in the order (row, column, channel), as vit-pytorch and the code of SPT
and LSA do. A convolution has the order (channel, row, column), so copies of these networks often confuse the two.
"""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.models.layers.blocks import PatchEmbedding
from gmmvit_deploy.models.layers.shifted_patches import ShiftedPatches


@torch.no_grad()
def flatten_channel_first(model: nn.Module) -> bool:
    """Make a model compute what the same weights give on patches that are flattened as (channel, row, column).

    The function permutes the weights of the linear layers on patches, and of the norms before these layers.
    Returns True if the model changed. A model without such layers, or with a single channel or patches of a single
    pixel, does not change.
    """
    changed = False
    for module in model.modules():
        if isinstance(module, PatchEmbedding):
            side, norm = module.patch_size, getattr(module, "patch_norm", None)
        elif isinstance(module, ShiftedPatches):
            side, norm = module.side, module.norm
        else:
            continue
        values = module.project.in_features
        if side == 1 or values == side**2:
            continue
        order = torch.arange(values).reshape(-1, side, side).permute(1, 2, 0).flatten()
        for tensor in (module.project.weight, *(() if norm is None else (norm.weight, norm.bias))):
            tensor.copy_(tensor[..., order].clone())
        changed = True
    return changed
