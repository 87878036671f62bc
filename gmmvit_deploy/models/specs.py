"""Model specs: the fields that define an architecture, without weights.

`ModelSpec` has the fields that are common to all models; each family adds fields (`gmmvit_deploy.models.families`).

This package uses these letters in shapes: B batch, N tokens, H heads, d head dim, D model dim, K Gaussians of a mixture
(mixture kernels), C classes, S image side in pixels, p patch side in pixels, c image channels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from gmmvit_deploy.errors import SpecError

OutputName = Literal["logits", "features"]
"""An output of a network.  ``logits``: a number for each class.  ``features``: the pooled tokens before the head."""
MEAN_OF_TOKENS = "mean of all tokens"
"""The pooling of families whose head does not read the class token."""
OUTPUTS: tuple[tuple[OutputName, ...], ...] = (("logits",), ("features",), ("logits", "features"))
"""The outputs that a network can have, in the order of the graph's outputs."""
MaskKind = Literal["plain", "gmm", "elm", "decay"]
Interpolation = Literal["timm", "torchvision", "deit", "dino"]
"""Algorithms that resample position embeddings for another image size (`layers.positions`)."""
INTERPOLATIONS: tuple[Interpolation, ...] = get_args(Interpolation)
CHANNELS = (1, 2, 3, 4)
"""Supported numbers of image channels: grey, grey and alpha, RGB, RGB and alpha."""


def require(condition: bool, message: str, hint: str = "") -> None:
    """Raise SpecError with ``message`` and ``hint`` unless the condition holds."""
    if not condition:
        raise SpecError(message, hint=hint)


def require_counts(spec: object, *names: str) -> None:
    """Require an integer of at least 1, or a tuple of such integers, in each named field.  Errors: SpecError."""
    for name in names:
        value = getattr(spec, name)
        numbers = value if isinstance(value, tuple) else (value,)
        require(
            bool(numbers) and all(isinstance(number, int) and number >= 1 for number in numbers),
            f"{name}: expected whole numbers of at least 1, got {value!r}",
        )


def require_tiling(image_size: int, patch_size: int) -> None:
    """Require a patch size that divides the image size.  Errors: SpecError."""
    require(
        image_size % patch_size == 0, f"patch size: expected a divisor of the image size {image_size}, got {patch_size}"
    )


def plain_json(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of JSON values.  name: the field, for messages.  Errors: SpecError for any other value."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(values)))
    except (TypeError, ValueError) as exc:
        raise SpecError(f"{name}: expected JSON values: {exc}") from exc
    return copy


def require_no_mask_with(spec: ModelSpec, *flags: str) -> None:
    """Require that no named flag is True in a spec with a mask.  Errors: SpecError."""
    for flag in flags:
        require(
            not getattr(spec, flag) or spec.mask.kind == "plain",
            f"{flag}: no {spec.family} has both {flag.upper()} and a mask on the attention scores",
        )


def require_stages(depths: tuple[int, ...], heads: tuple[int, ...], mlp_dims: tuple[int, ...]) -> None:
    """Require a depth, a number of heads and an mlp width for each stage.  Errors: SpecError."""
    require(
        len(depths) == len(heads) == len(mlp_dims),
        "expected a depth, a number of heads and an mlp width for each stage, "
        f"got {len(depths)} depths, {len(heads)} numbers of heads and {len(mlp_dims)} mlp widths",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """The mask on the attention scores of every block.

    kind:        ``plain``: no mask; ``gmm``: Gaussian mixture mask; ``elm``: elementwise learnable mask;
                 ``decay``: a bias that decreases with the distance of two tokens, as in RMT.
    kernels:     K, the number of Gaussians in a mixture; 0 unless ``kind`` is ``gmm``.
    shared:      True if all heads share a Gaussian mixture.
    closed_form: True if the model was trained with the formula Σ α·exp(−d²/(2σ²+ε)) of the paper "Toward a Deeper
                 Understanding: RetNet Viewed through Convolution", computed from the token distances d. False if the
                 model was trained with the paper authors' released code, which raises the entries of a stored float32
                 base matrix to a power. Far from the diagonal, the entries of the stored matrix have underflowed to
                 zero, so the two values mean different networks.
    """

    kind: MaskKind = "plain"
    kernels: int = 0
    shared: bool = False
    closed_form: bool = False

    def __post_init__(self) -> None:
        require(
            self.kind in get_args(MaskKind),
            f"mask kind: expected one of {', '.join(get_args(MaskKind))}, got {self.kind!r}",
        )
        if self.kind == "gmm":
            require(self.kernels >= 1, f"expected at least 1 kernel in a Gaussian mixture, got {self.kernels}")
        else:
            require(
                self.kernels == 0 and not self.shared and not self.closed_form,
                f"mask kind {self.kind}: kernels, shared and closed_form are only for Gaussian mixture masks",
            )

    def for_heads(self, *heads: int) -> MaskSpec:
        """Return the mask of attentions with these numbers of heads: a single head cannot share a mask."""
        return replace(self, shared=self.shared and max(heads) > 1)

    def __str__(self) -> str:
        if self.kind != "gmm":
            return self.kind
        form = "closed form" if self.closed_form else "stored base"
        return f"gmm, K={self.kernels}, {'shared by all heads' if self.shared else 'per head'}, {form}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Fields common to all models.  Abstract class: each family derives a spec.

    image_size: S, height and width in pixels.  classes: C; 0 for a network without a classifier.
    channels: c, the image channels.  mask_kinds: the kinds of mask that the architecture supports.
    headless: True if networks of the family can have no classifier.
    flags: the fields of variants, which JSON omits while they are False.
    Errors: SpecError when a value is invalid.
    """

    family: ClassVar[str]
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain", "gmm", "elm")
    flags: ClassVar[tuple[str, ...]] = ()
    headless: ClassVar[bool] = False
    image_size: int
    classes: int
    mask: MaskSpec
    channels: int = 3

    def __post_init__(self) -> None:
        require(
            self.channels in CHANNELS,
            f"channels: expected one of {', '.join(map(str, CHANNELS))}, got {self.channels!r}",
        )
        require_counts(self, "image_size", *([] if self.headless and self.classes == 0 else ["classes"]))
        require(
            self.mask.kind in self.mask_kinds,
            f"mask kind of a model of the family {self.family}: expected one of {', '.join(self.mask_kinds)}, got "
            f"{self.mask.kind}",
        )

    @property
    def image_shape(self) -> tuple[int, int]:
        """(height, width) of the images in pixels; ``image_width`` is a field of families with oblong images."""
        return (self.image_size, getattr(self, "image_width", None) or self.image_size)

    @property
    def resizing(self) -> str:
        """How the model was resized to another image size than in training; empty if the model was not resized."""
        return ""

    @property
    def description(self) -> str:
        """The name of the architecture in messages.  A family that builds several architectures overrides this."""
        return self.family

    @property
    def title(self) -> str:
        """The architecture and its mask, if it has one, for reports."""
        return self.description if self.mask.kind == "plain" else f"{self.description}, {self.mask} mask"

    @property
    def misfit_hint(self) -> str:
        """What to do if the tensors of a file do not fit the architecture; empty for the general hint."""
        return ""

    @property
    def first_heads(self) -> int | None:
        """Number of heads of the first attention, which ``--set heads`` sets; None for a spec without ``heads``."""
        heads = getattr(self, "heads", None)
        return heads[0] if isinstance(heads, tuple) else heads


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec(ModelSpec):
    """A network on square patches whose blocks all have the same sizes.  Abstract class.

    patch_size: p, in pixels.  dim: D, the width of the tokens.  mlp_dim: the hidden width of an mlp.
    """

    patch_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depth", "heads", "mlp_dim")
        require_tiling(self.image_size, self.patch_size)

    @property
    def grid(self) -> int:
        """The number of patches along a side of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """N: the number of patches, plus 1 for a class token; the field ``class_token`` says that a model has none."""
        return self.grid**2 + int(getattr(self, "class_token", True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesSpec(ModelSpec):
    """A network on square patches in stages, each of which doubles the width of the stage before.  Abstract class.

    patch_size: p, in pixels.  dim: the width of the first stage.
    depths, heads, mlp_dims: the number of blocks, the number of heads and the mlp width of each stage.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa")
    patch_size: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlp_dims: tuple[int, ...]
    spt: bool = False
    lsa: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depths", "heads", "mlp_dims")
        require_tiling(self.image_size, self.patch_size)
        require_stages(self.depths, self.heads, self.mlp_dims)
        require_no_mask_with(self, "spt", "lsa")

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim << stage for stage in range(len(self.depths)))


def input_shape(spec: ModelSpec) -> tuple[int, int, int]:
    """Return the shape of the input tensor of a single image: (channels, height, width)."""
    return (spec.channels, *spec.image_shape)


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """Return the spec as plain JSON values; inverse of ``families.spec_from_json``."""
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(spec).items()
        if value or name not in spec.flags
    }
    return {"family": spec.family, **values}
