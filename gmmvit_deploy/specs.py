"""What a model is, in numbers: enough to build it, nothing about its weights.

Shape letters used in this package: B batch, N tokens, H heads, d head dim, D model dim,
K mixture kernels, C classes, S image side in pixels, p patch side in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gmmvit_deploy.errors import SpecError

__all__ = ["MaskKind", "MaskSpec", "ModelSpec", "ViTSpec", "spec_from_json", "spec_to_json"]

MaskKind = Literal["plain", "gmm", "elm"]


def _require(condition: bool, message: str, hint: str = "") -> None:
    if not condition:
        raise SpecError(message, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """The mask on the attention scores of every block.

    kind:        ``plain`` none; ``gmm`` Gaussian mixture; ``elm`` element-wise learnable matrix
    kernels:     K, Gaussians in the mixture (0 unless gmm)
    shared:      one Gaussian mixture for all heads instead of one a head
    closed_form: the model was trained with the paper's formula Σ α·exp(−d²/(2σ²+ε)), computed
                 from distances. The released code instead raises a stored float32 base to a
                 power, and that base has underflowed to zero far from the diagonal: the two are
                 different networks, so this is part of what the model is.
    """

    kind: MaskKind = "plain"
    kernels: int = 0
    shared: bool = False
    closed_form: bool = False

    def __post_init__(self) -> None:
        _require(
            self.kind in get_args(MaskKind),
            f"mask kind {self.kind!r} is not one of {', '.join(get_args(MaskKind))}",
        )
        if self.kind == "gmm":
            _require(self.kernels >= 1, f"a Gaussian mixture needs kernels, found {self.kernels}")
        else:
            _require(
                self.kernels == 0 and not self.shared and not self.closed_form,
                f"a {self.kind} mask has no kernels, sharing or closed form",
            )

    def __str__(self) -> str:
        if self.kind != "gmm":
            return self.kind
        form = "closed form" if self.closed_form else "stored base"
        return f"gmm, K={self.kernels}, {'shared by all heads' if self.shared else 'per head'}, {form}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTSpec:
    """A vision transformer on square RGB images cut into square patches."""

    image_size: int
    patch_size: int
    classes: int
    dim: int
    depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    class_token: bool
    mask: MaskSpec

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "classes", "dim", "depth", "heads", "head_dim", "mlp_dim"):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and value >= 1,
                f"{name} is {value!r}; a whole number of at least 1 was wanted",
            )
        _require(
            self.image_size % self.patch_size == 0,
            f"patches of {self.patch_size} pixels do not tile an image of {self.image_size}",
        )
        _require(
            not (self.class_token and self.mask.kind != "plain"),
            "a masked ViT has no class token: the mask lies over the patch grid alone",
        )

    @property
    def family(self) -> str:
        return "vit"

    @property
    def grid(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """N: patches, and the class token where there is one."""
        return self.grid**2 + int(self.class_token)

    @property
    def inner_dim(self) -> int:
        """Width of q, of k and of v over all heads: H·d."""
        return self.heads * self.head_dim

    @property
    def projects_output(self) -> bool:
        """The released attention drops its output projection when one head spans the model."""
        return not (self.heads == 1 and self.head_dim == self.dim)


ModelSpec = ViTSpec  # becomes a union when a second family arrives


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """The spec as plain JSON values; ``spec_from_json`` takes it back."""
    return {"family": spec.family, **asdict(spec)}


def spec_from_json(data: Mapping[str, Any]) -> ModelSpec:
    """Rebuild a spec.  Errors: SpecError on an unknown family, or a field missing or unknown."""
    fields = dict(data)
    family = fields.pop("family", None)
    _require(family == "vit", f"model family {family!r} is not known; this version knows: vit")
    try:
        return ViTSpec(**{**fields, "mask": MaskSpec(**fields["mask"])})
    except (TypeError, KeyError) as exc:
        raise SpecError(f"not a model spec: {exc}") from exc
