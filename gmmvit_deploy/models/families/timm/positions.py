"""The image size that the stored position embeddings of a timm model show.

    tokens = prefix + (height / patch) · (width / patch)

pos_embed (1, tokens, D). timm's own model of the architecture has the prefix and the patch; its grid is compared with
the tokens of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.families.timm.network import network_from_spec
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["Positions", "positions_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The position embeddings of a file.

    tokens: their number in the file.  prefix: how many belong to class token and registers.
    patch: (height, width) of a patch in pixels.
    """

    tokens: int
    prefix: int
    patch: tuple[int, int]

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the images in pixels, for a square grid; None if the tokens are those of no square."""
        patches = self.tokens - self.prefix
        side = math.isqrt(max(patches, 0))
        return (side * self.patch[0], side * self.patch[1]) if side and side**2 == patches else None

    @property
    def as_square(self) -> str:
        """Say that the size is that of a square, because the tokens do not tell it from a rectangle."""
        return f"{self}; assumed to be square, else type --model-args '{{\"img_size\": [HEIGHT, WIDTH]}}'"

    def tokens_for(self, size: tuple[int, int]) -> int:
        """Return the number of position embeddings for images of ``size``."""
        return self.prefix + (size[0] // self.patch[0]) * (size[1] // self.patch[1])

    def __str__(self) -> str:
        height, width = self.patch
        return f"pos_embed ({self.tokens} tokens), patch {height if height == width else f'{height} × {width}'}"


def positions_of(shapes: Shapes, architecture: str, model_args: Mapping[str, Any]) -> Positions | None:
    """Return the position embeddings, or None if the file has none, or none that belong to the patches of a grid.

    model_args: the arguments of ``timm.create_model``; their ``img_size`` is not read.
    A model that timm cannot build gives None too: the later comparison with all tensors says why.
    """
    from torch import Tensor

    from gmmvit_deploy.models.layers.shapes_only import shapes_only

    stored, weight = shapes.tensors.get("pos_embed"), shapes.tensors.get("patch_embed.proj.weight")
    if stored is None or stored.dim() != 3 or model_args.get("dynamic_img_size"):
        return None
    arguments = {name: value for name, value in model_args.items() if name != "img_size"}
    with shapes_only():
        spec = TimmSpec(architecture=architecture, model_args=arguments, image_size=1, classes=1, mask=MaskSpec())
        try:
            network = network_from_spec(spec)
        except SpecError:
            return None
    own, embedding = getattr(network, "pos_embed", None), getattr(network, "patch_embed", None)
    image, grid = (getattr(embedding, name, None) for name in ("img_size", "grid_size"))
    if not isinstance(own, Tensor) or own.dim() != 3 or image is None or grid is None:
        return None
    own_weight = getattr(getattr(embedding, "proj", None), "weight", None)
    if weight is not None and own_weight is not None and weight.shape[2:] != own_weight.shape[2:]:
        return None  # the comparison of all tensors says that the patch differs
    # DINOv2's files with registers have a position of the class token, which timm adds to the token itself.
    prefix = 1 if "register_tokens" in shapes else own.shape[1] - math.prod(grid)
    patch = (image[0] // grid[0], image[1] // grid[1])
    return Positions(tokens=int(stored.shape[1]), prefix=prefix, patch=patch)
