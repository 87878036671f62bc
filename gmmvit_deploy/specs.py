"""What a model is, in numbers: enough to build it, nothing about its weights.

One dataclass a family; `ModelSpec` is any of them.

Shape letters used in this package: B batch, N tokens, H heads, d head dim, D model dim,
K mixture kernels, C classes, S image side in pixels, p patch side in pixels, c image channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

from gmmvit_deploy.errors import SpecError

__all__ = [
    "CHANNELS",
    "FAMILIES",
    "CaiTSpec",
    "MaskKind",
    "MaskSpec",
    "ModelSpec",
    "PiTSpec",
    "SwinSpec",
    "T2TSpec",
    "ViTSpec",
    "input_shape",
    "spec_from_json",
    "spec_to_json",
]

MaskKind = Literal["plain", "gmm", "elm"]
CHANNELS = (1, 2, 3, 4)
"""That images may have: grey, grey and alpha, RGB, RGB and alpha."""


def _require(condition: bool, message: str, hint: str = "") -> None:
    if not condition:
        raise SpecError(message, hint=hint)


def _require_counts(spec: object, *names: str) -> None:
    """Every named field is a whole number of at least 1, or a tuple of such."""
    for name in names:
        value = getattr(spec, name)
        numbers = value if isinstance(value, tuple) else (value,)
        _require(
            bool(numbers) and all(isinstance(number, int) and number >= 1 for number in numbers),
            f"{name} is {value!r}; whole numbers of at least 1 were wanted",
        )


def _require_channels(channels: int) -> None:
    _require(channels in CHANNELS, f"channels: expected one of {', '.join(map(str, CHANNELS))}, got {channels!r}")


def _require_tiling(image_size: int, patch_size: int) -> None:
    _require(image_size % patch_size == 0, f"patches of {patch_size} pixels do not tile an image of {image_size}")


def _require_stages(depths: tuple[int, ...], heads: tuple[int, ...], mlp_dims: tuple[int, ...]) -> None:
    _require(
        len(depths) == len(heads) == len(mlp_dims),
        f"{len(depths)} depths, {len(heads)} heads and {len(mlp_dims)} mlp widths; one a stage",
    )


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
    """A vision transformer on square images cut into square patches."""

    family: ClassVar[str] = "vit"
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
    channels: int = 3

    def __post_init__(self) -> None:
        _require_channels(self.channels)
        _require_counts(self, "image_size", "patch_size", "classes", "dim", "depth", "heads", "head_dim", "mlp_dim")
        _require_tiling(self.image_size, self.patch_size)
        _require(
            not (self.class_token and self.mask.kind != "plain"),
            "a masked ViT has no class token: the mask lies over the patch grid alone",
        )

    @property
    def grid(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """N: patches, and the class token where there is one."""
        return self.grid**2 + int(self.class_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwinSpec:
    """Swin: windows of ``window`` × ``window`` tokens, shifted in odd blocks; stages halve the grid.

    dim: of the first stage; it doubles from stage to stage.  depths, heads, mlp_dims: by stage.
    """

    family: ClassVar[str] = "swin"
    image_size: int
    patch_size: int
    classes: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    mlp_dims: tuple[int, ...]
    mask: MaskSpec
    channels: int = 3

    def __post_init__(self) -> None:
        _require_channels(self.channels)
        _require_counts(self, "image_size", "patch_size", "classes", "dim", "depths", "heads", "window", "mlp_dims")
        _require_tiling(self.image_size, self.patch_size)
        _require_stages(self.depths, self.heads, self.mlp_dims)
        _require(self.mask.kind != "elm", "there is no ELM-Swin")
        for stage, heads in enumerate(self.heads):
            grid, dim = self.grids[stage], self.dims[stage]
            _require(dim % heads == 0, f"stage {stage}: {heads} heads do not divide its width {dim}")
            _require(
                grid % self.window == 0 and grid >= self.window,
                f"stage {stage}: windows of {self.window} do not tile its {grid}×{grid} grid",
            )

    @property
    def grids(self) -> tuple[int, ...]:
        """Tokens along one side, by stage."""
        return tuple((self.image_size // self.patch_size) >> stage for stage in range(len(self.depths)))

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim << stage for stage in range(len(self.depths)))

    def shift(self, stage: int, block: int) -> int:
        """By how much a block rolls its grid: half a window in odd blocks, where there is more than one window."""
        return self.window // 2 if block % 2 and self.grids[stage] > self.window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaiTSpec:
    """CaiT: masked patch blocks that mix their heads, then class blocks that read from the patches."""

    family: ClassVar[str] = "cait"
    image_size: int
    patch_size: int
    classes: int
    dim: int
    depth: int
    class_depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    mask: MaskSpec
    channels: int = 3

    def __post_init__(self) -> None:
        _require_channels(self.channels)
        _require_counts(
            self,
            "image_size",
            "patch_size",
            "classes",
            "dim",
            "depth",
            "class_depth",
            "heads",
            "head_dim",
            "mlp_dim",
        )
        _require_tiling(self.image_size, self.patch_size)

    @property
    def grid(self) -> int:
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PiTSpec:
    """PiT: ViT stages with a class token; between them a strided convolution halves the grid and doubles the width.

    dim: of the first stage.  depths, heads, mlp_dims: by stage.  head_dim: the same in all.
    """

    family: ClassVar[str] = "pit"
    image_size: int
    patch_size: int
    classes: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    head_dim: int
    mlp_dims: tuple[int, ...]
    mask: MaskSpec
    channels: int = 3

    def __post_init__(self) -> None:
        _require_channels(self.channels)
        _require_counts(self, "image_size", "patch_size", "classes", "dim", "depths", "heads", "head_dim", "mlp_dims")
        _require_tiling(self.image_size, self.patch_size)
        _require_stages(self.depths, self.heads, self.mlp_dims)

    @property
    def grids(self) -> tuple[int, ...]:
        """Patches along one side, by stage: a stride of 2 rounds up."""
        grids = [self.image_size // self.patch_size]
        for _ in self.depths[1:]:
            grids.append((grids[-1] + 1) // 2)
        return tuple(grids)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim << stage for stage in range(len(self.depths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class T2TSpec:
    """T2T-ViT: overlapping patches go through one-head token transformers, then through a ViT.

    token_layers: token transformers before the last unfold.  token_mlp_dim: their mlp width.
    """

    family: ClassVar[str] = "t2t"
    image_size: int
    classes: int
    dim: int
    depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    token_layers: int
    token_dim: int
    token_mlp_dim: int
    mask: MaskSpec
    channels: int = 3

    def __post_init__(self) -> None:
        _require_channels(self.channels)
        _require_counts(
            self,
            "image_size",
            "classes",
            "dim",
            "depth",
            "heads",
            "head_dim",
            "mlp_dim",
            "token_layers",
            "token_dim",
            "token_mlp_dim",
        )
        _require(
            self.image_size % 2 ** (self.token_layers + 1) == 0,
            f"an image of {self.image_size} cannot be halved {self.token_layers + 1} times",
        )

    @property
    def grids(self) -> tuple[int, ...]:
        """Tokens along one side at each token transformer, and, last, in the ViT."""
        return tuple(self.image_size >> step for step in range(1, self.token_layers + 2))


ModelSpec = ViTSpec | SwinSpec | CaiTSpec | PiTSpec | T2TSpec
FAMILIES: dict[str, type[ModelSpec]] = {kind.family: kind for kind in (ViTSpec, SwinSpec, CaiTSpec, PiTSpec, T2TSpec)}


def input_shape(spec: ModelSpec) -> tuple[int, int, int]:
    """Shape of the tensor that the network takes of one image: (channels, height, width)."""
    return (spec.channels, spec.image_size, spec.image_size)


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """The spec as plain JSON values; ``spec_from_json`` takes it back."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(spec).items()}
    return {"family": spec.family, **values}


def spec_from_json(data: Mapping[str, Any]) -> ModelSpec:
    """Rebuild a spec.  Errors: SpecError on an unknown family, or a field missing or unknown."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    family = fields.pop("family", None)
    _require(family in FAMILIES, f"model family {family!r} is not known; known: {', '.join(FAMILIES)}")
    try:
        fields["mask"] = MaskSpec(**fields["mask"])
        return FAMILIES[str(family)](**fields)
    except (TypeError, KeyError) as exc:
        raise SpecError(f"not a model spec: {exc}") from exc
