"""Are shifted patches (SPT) faster as a convolution than as moves of pixels?

In the exported graph, Pad, Slice, Concat, Reshape and Transpose cut patches of m × m pixels from the image and its four
shifted copies. In Swin's merging of 2 × 2 tokens, a Gather picks the tokens of each patch. Every value of a patch is a
pixel of the image, at most s = m // 2 pixels outside of the patch, or a zero outside of the image. A convolution of the
image computes the same values, bit for bit:

    filters of (m + 2s) × (m + 2s), stride m, padding s; each filter has a single 1 and selects a pixel

Two forms with convolutions, and a form with other moves, are measured against the exported graph:

    dense     the patch embedding as a convolution of all channels, features in the order of the patches
    grouped   the patch embedding, and in Swin each merging of 2 × 2 tokens, as a convolution within each channel, which
              multiplies by fewer zeros. The features follow each other by channel, so the weights of the LayerNorm and
              the columns of the linear layer are reordered
    views     Swin's merging with the tokens as an image, cut by Pad, Slice, Concat and Transpose like the first
              patches; in ViT, this form is the exported graph

The systems are ViT and Swin with SPT and LSA at 32×32, in the sizes of `fastest_cpu.py`. Each form runs in each CPU
runner with our kernels. The script stops if the float64 logits of the forms differ, or if the logits of a program
exceed the limits of parity (`gmmvit_deploy/tolerances.py`). Each program is loaded twice, and every round runs a random
copy.

    python benchmarks/rejected/shifted_patches_as_convolution.py [--rounds 15] [--check] [--output RESULT]
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks.shared.two_forms import main
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.layers.blocks import flat_patches
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.layers.roles import with_role
from gmmvit_deploy.layers.shifted_patches import VIEWS, ShiftedMerging, ShiftedPatches, ShiftedViews


class SelectedPatches(nn.Module):
    """The patches of an image and its four shifted copies, as a convolution: (B, c, h, w) → (B, h·w / m², 5·c·m²).

    grouped: False for features in the order of `flat_patches`: (row, column, view, channel); True for a convolution
    within each channel, with features in the order (channel, row, column, view).
    order: the position of each feature in the order of `flat_patches`.
    """

    def __init__(self, side: int, channels: int, *, grouped: bool) -> None:
        super().__init__()
        s, count = side // 2, VIEWS * side**2
        reach = side + 2 * s
        corners = [(s, s), (0, 0), (0, 2 * s), (2 * s, 0), (2 * s, 2 * s)]
        filters = torch.zeros(side, side, VIEWS, reach, reach)
        for row in range(side):
            for column in range(side):
                for view, (top, left) in enumerate(corners):
                    filters[row, column, view, row + top, column + left] = 1
        select = nn.Conv2d(
            channels,
            channels * count,
            reach,
            stride=side,
            padding=s,
            groups=channels if grouped else 1,
            bias=False,
        )
        self.order = torch.arange(channels * count)
        with torch.no_grad():
            filters = filters.reshape(count, reach, reach)
            if grouped:
                self.order = self.order.reshape(count, channels).T.flatten()
                select.weight.copy_(filters[:, None].repeat(channels, 1, 1, 1))
            else:
                eye = torch.eye(channels)[None, :, :, None, None]
                select.weight.copy_((filters[:, None, None] * eye).flatten(0, 1))
        self.select = with_role(select.requires_grad_(False), "depthwise" if grouped else "embedding")

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch n values"]:
        selected: Tensor = self.select(x)
        return selected.flatten(2).transpose(1, 2)


class ConvolvedPatches(nn.Module):
    """`ShiftedPatches` with `SelectedPatches`.

    Errors: FoldError when the convolution of a random image differs from the shifted patches in any bit.
    """

    def __init__(self, patches: ShiftedPatches, *, grouped: bool) -> None:
        super().__init__()
        side = patches.side
        channels = patches.project.in_features // (VIEWS * side**2)
        self.select = SelectedPatches(side, channels, grouped=grouped)
        order = self.select.order
        image = torch.randn(2, channels, 4 * side, 4 * side, generator=torch.Generator().manual_seed(0))
        if not self.select(image).equal(flat_patches(ShiftedViews(side // 2)(image), side)[..., order]):
            raise FoldError("the convolution that replaces shifted patches changes the patches")
        self.norm, self.project = copy.deepcopy(patches.norm), copy.deepcopy(patches.project)
        with torch.no_grad():
            for tensor in (self.norm.weight, self.norm.bias):
                tensor.copy_(tensor[order])
            self.project.weight.copy_(self.project.weight[:, order])

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch n dim"]:
        tokens: Tensor = self.project(self.norm(self.select(x)))
        return tokens


class MergingOfImages(nn.Module):
    """`ShiftedMerging` with the tokens as an image: (B, g², D) → (B, g²/4, 2D).  patches: reads (B, D, g, g)."""

    def __init__(self, merging: ShiftedMerging, patches: nn.Module) -> None:
        super().__init__()
        self.grid, self.patches = merging.grid, patches

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch quarter twice"]:
        merged: Tensor = self.patches(x.transpose(1, 2).unflatten(2, (self.grid, self.grid)))
        return merged


def folded_dense(model: Model) -> Model:
    """Fold a model, and replace its patch embedding by a `ConvolvedPatches` over all channels."""
    folded = fold(model).model
    folded.patch_embedding = ConvolvedPatches(folded.patch_embedding, grouped=False)
    return folded


def folded_grouped(model: Model) -> Model:
    """Fold a model, and replace each `ShiftedPatches` by a `ConvolvedPatches` within each channel."""
    folded = fold(model).model
    folded.patch_embedding = ConvolvedPatches(folded.patch_embedding, grouped=True)
    return with_mergings(folded, lambda patches: ConvolvedPatches(patches, grouped=True))


def folded_views(model: Model) -> Model:
    """Fold a model, and write each merging of tokens as `ShiftedPatches` of an image of tokens."""
    return with_mergings(fold(model).model, lambda patches: patches)


def with_mergings(model: Model, of: Callable[[ShiftedPatches], nn.Module]) -> Model:
    """Replace each `ShiftedMerging` by a `MergingOfImages` with the module that ``of`` makes of its patches."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ShiftedMerging):
                setattr(parent, name, MergingOfImages(child, of(child.patches)))
    return model


if __name__ == "__main__":
    forms = {"dense": folded_dense, "grouped": folded_grouped, "views": folded_views}
    main(__file__, str(__doc__), forms=forms, systems=("vit_spt_lsa", "swin_spt_lsa"))
