"""RMT (Retentive Networks Meet Vision Transformers): attention with a Manhattan decay.

patch_embed.proj.{0,3,6,9}              convolutions of the stem; .{1,4,7,10} their BatchNorms
layers.{s}.Relpos.{angle,decay}         buffers: the angles of the rotation (d) and the decays (H)
layers.{s}.blocks.{b}                   pos.conv, retention_layer_norm, retention.{q,k,v,out}_proj,
                                        retention.lepe.conv, final_layer_norm, ffn.{fc1,fc2}, ffn.dwconv.conv (since
                                        2024), gamma_1 and gamma_2 (1, 1, 1, D) in stages with LayerScale
layers.{s}.downsample                   reduction, norm; not in the last stage
proj, norm, head, aux_head              proj since 2024, aux_head with token labels

No tensor shows the side of the images, or whether a stage attends to the whole grid.

The names of the presets are those of the functions of the authors' code. The release of 2023 also has an ``RMT_S``,
which here is ``RMT_S_2023``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.family import Family, Network, stage_blocks
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.shapes import Shapes, field_differences, infer_heads, recorded_preset
from gmmvit_deploy.models.sources.source import CheckpointSource, Conversion, TensorOrigins, renamed, within
from gmmvit_deploy.models.specs import MaskKind, MaskSpec, ModelSpec, require, require_counts, require_stages

if TYPE_CHECKING:
    from torch import Tensor


Release: TypeAlias = Literal["2023", "2024", "token_label"]
"""The releases of the paper authors' code, which build different networks.

2023: no rotary position embedding, no depthwise convolution in the MLP, a BatchNorm and the head at the end.
2024: rotary position embedding, a depthwise convolution in the MLP, and a projection with BatchNorm before the head.
token_label: the network of 2024 with a second head on every position, whose largest logits count half.
"""
RELEASES: tuple[Release, ...] = get_args(Release)
_MAX_CONSTANT_BYTES = 2 << 30  # folding and export hold several copies of the constants


@dataclass(frozen=True, slots=True, kw_only=True)
class RMTSpec(ModelSpec):
    """RMT: attention with a Manhattan decay on grids of tokens, in stages; each later stage halves the grid.

    dims, depths, heads, mlp_dims: the width, the number of blocks, the number of heads and the MLP width of each stage.
    decomposed_stages: the stages, counted from 1, whose attention runs along the rows and then along the columns of
    the grid. The other stages attend to the whole grid.
    layer_scale: the stages, counted from 1, whose blocks multiply their branches by a learned factor for each feature.
    release: a name of `RELEASES`.
    projection_dim: the width of the projection before the head; 0 in the release of 2023, which has no projection.
    Errors: SpecError as for `ModelSpec`, and when the constants for the image size would fill the memory.
    """

    family: ClassVar[str] = "rmt"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("decay",)
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlp_dims: tuple[int, ...]
    decomposed_stages: tuple[int, ...]
    layer_scale: tuple[int, ...]
    release: str
    projection_dim: int

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "dims", "depths", "heads", "mlp_dims")
        require_stages(self.depths, self.heads, self.mlp_dims)
        stages = len(self.depths)
        require(len(self.dims) == stages, f"expected a width for each of {stages} stages, got {len(self.dims)} widths")
        for name in ("decomposed_stages", "layer_scale"):
            value = getattr(self, name)
            require(
                all(isinstance(stage, int) and 1 <= stage <= stages for stage in value)
                and list(value) == sorted(set(value)),
                f"{name}: expected different stages from 1 to {stages}, in ascending order, got {value!r}",
            )
        require(self.release in RELEASES, f"release: expected one of {', '.join(RELEASES)}, got {self.release!r}")
        require(
            isinstance(self.projection_dim, int) and (self.projection_dim > 0) == (self.release != "2023"),
            f"projection_dim: expected {'0' if self.release == '2023' else 'at least 1'} in the release "
            f"{self.release}, got {self.projection_dim!r}",
        )
        require(self.dims[0] % 2 == 0, f"expected an even width in the first stage, got {self.dims[0]}")
        for stage, (dim, heads) in enumerate(zip(self.dims, self.heads, strict=True), start=1):
            require(
                dim % (2 * heads) == 0,
                f"stage {stage}: expected {heads} heads of an even head dim, got the width {dim}",
            )
        require(
            self.constant_bytes <= _MAX_CONSTANT_BYTES,
            f"the decays and rotations for images of {self.image_size}×{self.image_size} pixels take "
            f"{self.constant_bytes / 2**30:,.1f} GiB; expected at most {_MAX_CONSTANT_BYTES / 2**30:.0f} GiB",
            hint="type a smaller --image-size; decomposed stages, if training decomposed them, take less memory than "
            "stages that attend to the whole grid",
        )

    @property
    def rotates(self) -> bool:
        """Whether the attentions rotate Q and K by the position of the token (rotary position embedding)."""
        return self.release != "2023"

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of tokens along a side of the grid of each stage: a convolution of stride 2 rounds up."""
        sides = [-(-self.image_size // 4)]
        while len(sides) < len(self.depths):
            sides.append(-(-sides[-1] // 2))
        return tuple(sides)

    @property
    def constant_bytes(self) -> int:
        """The bytes of the float32 constants that depend on the image size.

        Decays of a block: (H, n, n) for n tokens, or twice (H, side, side) in a decomposed stage.
        Rotation of a stage: cos and sin, each (n, D).
        """
        values = 0
        for stage, side in enumerate(self.grids):
            decay = 2 * side**2 if stage + 1 in self.decomposed_stages else side**4
            values += self.depths[stage] * self.heads[stage] * decay
            values += 2 * side**2 * self.dims[stage] if self.rotates else 0
        return 4 * values


IMAGE_SIZE = 224
"""The side in pixels of the images with which the paper's authors trained every preset."""
_PROJECTION_DIM = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlp_ratios: tuple[int, ...]
    decomposed_stages: tuple[int, ...] = (1, 2, 3)
    layer_scale: tuple[int, ...] = ()


_T = _Size(
    dims=(64, 128, 256, 512),
    depths=(2, 2, 8, 2),
    heads=(4, 4, 8, 16),
    mlp_ratios=(3, 3, 3, 3),
    decomposed_stages=(1, 2),
)
_S = _Size(dims=(64, 128, 256, 512), depths=(3, 4, 18, 4), heads=(4, 4, 8, 16), mlp_ratios=(4, 4, 3, 3))
_B = _Size(
    dims=(80, 160, 320, 512), depths=(4, 8, 25, 8), heads=(5, 5, 10, 16), mlp_ratios=(4, 4, 3, 3), layer_scale=(3, 4)
)
_L = _Size(
    dims=(112, 224, 448, 640), depths=(4, 8, 25, 8), heads=(7, 7, 14, 20), mlp_ratios=(4, 4, 3, 3), layer_scale=(3, 4)
)
_NAMED: Mapping[str, _Size] = {
    "RMT_T": _T,
    "RMT_T3": _T,
    "RMT_S": _S,
    "RMT_B": _B,
    "RMT_M2": _B,
    "RMT_L": _L,
    "RMT_L6": _L,
}
"""Names of the functions of the paper authors' code, of all releases."""


def _spec(size: _Size, release: Release, classes: int, image_size: int, mask: MaskSpec) -> RMTSpec:
    return RMTSpec(
        image_size=image_size,
        classes=classes,
        dims=size.dims,
        depths=size.depths,
        heads=size.heads,
        mlp_dims=tuple(ratio * dim for ratio, dim in zip(size.mlp_ratios, size.dims, strict=True)),
        decomposed_stages=size.decomposed_stages,
        layer_scale=size.layer_scale,
        release=release,
        projection_dim=0 if release == "2023" else _PROJECTION_DIM,
        # Every RMT has the decay. The kind ``plain`` stands for a preset without another kind of mask.
        mask=MaskSpec(kind="decay") if mask.kind == "plain" else mask,
    )


def preset_named(name: str, release: Release, *, classes: int) -> RMTSpec | None:
    """Return the preset for `IMAGE_SIZE` by the name of its function in the authors' code, or None for another name."""
    size = _NAMED.get(name)
    return None if size is None else _spec(size, release, classes, IMAGE_SIZE, MaskSpec())


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], RMTSpec]] = {
    "RMT_T3": partial(_spec, _T, "2024"),
    "RMT_S": partial(_spec, _S, "2024"),
    "RMT_M2": partial(_spec, _B, "2024"),
    "RMT_L6": partial(_spec, _L, "2024"),
    "RMT_T": partial(_spec, _T, "2023"),
    "RMT_S_2023": partial(_spec, _S, "2023"),
    "RMT_B": partial(_spec, _B, "2023"),
    "RMT_L": partial(_spec, _L, "2023"),
    "RMT_S_token_label": partial(_spec, _S, "token_label"),
    "RMT_M2_token_label": partial(_spec, _B, "token_label"),
    "RMT_L6_token_label": partial(_spec, _L, "token_label"),
}


_NOT_COMPARED = {"image_size", "classes", "mask"}  # with the preset that a file names


def infer_spec(shapes: Shapes, hints: LoadHints) -> RMTSpec:
    sizes = _sizes(shapes, hints)
    source, stages = shapes.source, len(sizes["depths"])
    given = hints.decomposed_stages
    if given is not None and max(given, default=0) > stages:
        raise CheckpointError(
            f"{source}: --set decomposed_stages={','.join(map(str, given))}, but the file has {stages} stages",
            hint="type for example --set decomposed_stages=1,2 (the first stage is 1), or --set decomposed_stages=none",
        )
    preset, where = _preset(shapes, hints, sizes)
    image_size = hints.image_size
    if image_size is None and preset is not None and _trained_at_preset_size(shapes):
        image_size, shapes.taken_from["image_size"] = preset.image_size, where
    if given is None and preset is not None:
        shapes.taken_from["decomposed_stages"] = where
        given = _within(preset, sizes)  # all stages of the preset, unless the loader refuses the preset
    if image_size is None or given is None:
        raise _unknown(shapes, image_size, given, "" if preset is not None else where)
    return RMTSpec(**sizes, image_size=image_size, decomposed_stages=tuple(sorted(given)))


def _sizes(shapes: Shapes, hints: LoadHints) -> dict[str, Any]:
    """Return the fields of the spec that the tensors show."""
    stages = range(shapes.count(r"layers\.(\d+)\."))
    depths = [shapes.count(rf"layers\.{s}\.blocks\.(\d+)\.") for s in stages]
    dims = [shapes.of(f"layers.{s}.blocks.0.retention.q_proj.weight", rank=2)[0] for s in stages]
    heads = [shapes.of(f"layers.{s}.Relpos.decay", rank=1)[0] for s in stages]
    infer_heads(
        shapes, hints, width=dims[0], shown=(heads[0], "the number of decays of the first stage is"), presets=PRESETS
    )
    release = _release(shapes, depths)
    return {
        "classes": shapes.of("head.weight", rank=2)[0],
        "channels": shapes.of("patch_embed.proj.0.weight", rank=4)[1],
        "dims": tuple(dims),
        "depths": tuple(depths),
        "heads": tuple(heads),
        "mlp_dims": tuple(shapes.of(f"layers.{s}.blocks.0.ffn.fc1.weight", rank=2)[0] for s in stages),
        "layer_scale": tuple(s + 1 for s in stages if f"layers.{s}.blocks.0.gamma_1" in shapes),
        "release": release,
        "projection_dim": 0 if release == "2023" else shapes.of("proj.weight", rank=2)[0],
        "mask": MaskSpec(kind="decay"),
    }


def _release(shapes: Shapes, depths: list[int]) -> Release:
    """Return the release whose network has these tensors."""
    projects, second_head = "proj.weight" in shapes, "aux_head.weight" in shapes
    convolutions = [
        f"layers.{s}.blocks.{b}.ffn.dwconv.conv.weight" in shapes
        for s, depth in enumerate(depths)
        for b in range(depth)
    ]
    if projects and all(convolutions):
        return "token_label" if second_head else "2024"
    if not projects and not any(convolutions) and not second_head:
        return "2023"
    raise CheckpointError(
        f"{shapes.source}: the file mixes the networks of different releases of RMT: proj.weight is "
        f"{'present' if projects else 'absent'}, aux_head.weight is {'present' if second_head else 'absent'}, and "
        f"{sum(convolutions)} of {len(convolutions)} blocks have ffn.dwconv; expected all blocks and proj.weight "
        "(2024, or token labels with aux_head.weight), or no block, no proj.weight and no aux_head.weight (2023)",
        hint="use the checkpoint as the training script saved it",
    )


def _preset(shapes: Shapes, hints: LoadHints, sizes: Mapping[str, Any]) -> tuple[RMTSpec | None, str]:
    """Return the preset of ``--preset``, or else as `recorded_preset`."""
    classes = sizes["classes"]
    if hints.preset is not None:
        return PRESETS[hints.preset](classes, IMAGE_SIZE, MaskSpec()), f"--preset {hints.preset}"

    def differences(preset: RMTSpec) -> list[str]:
        own = RMTSpec(**sizes, image_size=IMAGE_SIZE, decomposed_stages=_within(preset, sizes))
        return field_differences(own, preset, left_out=_NOT_COMPARED)

    named = partial(preset_named, release=sizes["release"], classes=classes)
    return recorded_preset(shapes, preset_named=named, differences=differences)


def _within(preset: RMTSpec, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the decomposed stages of the preset that the file has, so that a file of fewer stages has a spec."""
    return tuple(stage for stage in preset.decomposed_stages if stage <= len(sizes["depths"]))


def _trained_at_preset_size(shapes: Shapes) -> bool:
    """Return False if the training script states images of another size than the preset's."""
    return shapes.record.args.get("input_size") in (None, IMAGE_SIZE)


def _unknown(shapes: Shapes, image_size: int | None, stages: tuple[int, ...] | None, reason: str) -> CheckpointError:
    missing, options, stages_words = [], [], ""
    if image_size is None:
        missing.append("the side of the images")
        options.append("--image-size N")
    if stages is None:
        missing.append("which stages attend along rows and columns instead of the whole grid")
        options.append("--set decomposed_stages=LIST")
        stages_words = "; LIST is none, or the numbers of the stages, counted from 1, for example 1,2"
    size = shapes.record.args.get("input_size")
    if not reason and image_size is None and not _trained_at_preset_size(shapes):
        reason = f"; args.input_size is {size!r}, but the preset is for images of {IMAGE_SIZE} pixels"
    return CheckpointError(
        f"{shapes.source}: no tensor of this file shows {' and '.join(missing)}{reason}",
        hint=f"type {' and '.join(options)} with the values of the training{stages_words}. Wrong values raise no "
        "error, but the predictions are wrong",
    )


def tensor_origins(spec: RMTSpec, names: Iterable[str]) -> TensorOrigins:
    block, theirs = "stages.{}.blocks.{}", "layers.{}.blocks.{}"
    qkv = tuple(f"{theirs}.retention.{part}_proj" for part in "qkv")
    layers = {
        "position.convolution": "pos.conv",
        "attention_norm": "retention_layer_norm",
        "attention.local.convolution": "retention.lepe.conv",
        "attention.out": "retention.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.first": "ffn.fc1",
        "mlp.convolution.convolution": "ffn.dwconv.conv",
        "mlp.second": "ffn.fc2",
    }
    table: dict[str, str | Conversion] = {
        **{f"stem.convolutions.{i}.convolution": f"patch_embed.proj.{3 * i}" for i in range(4)},
        **{f"stem.convolutions.{i}.norm": f"patch_embed.proj.{3 * i + 1}" for i in range(4)},
        **within(block, theirs, layers),
        f"{block}.attention.qkv": Conversion(keys=qkv, convert=_stacked),
        f"{block}.attention_scale.gamma": Conversion(keys=(f"{theirs}.gamma_1",), convert=_flat),
        f"{block}.mlp_scale.gamma": Conversion(keys=(f"{theirs}.gamma_2",), convert=_flat),
        **{
            f"{block}.attention.{part}.scores.before.decay.decay": "layers.{}.Relpos.decay"
            for part in ("tokens", "rows", "columns")
        },
        "stages.{}.rotation.angle": "layers.{}.Relpos.angle",
        "stages.{}.downsampling.reduction.convolution": "layers.{}.downsample.reduction",
        "stages.{}.downsampling.reduction.norm": "layers.{}.downsample.norm",
        "projection.normed.linear": "proj",
        "projection.normed.norm": "norm",
        "norm": "norm",
        "head": "head",
        "token_head": "aux_head",
    }
    return renamed(names, table)


def _stacked(*tensors: Tensor) -> Tensor:
    """Stack the tensors of the linear layers of Q, K and V to the tensor of a single linear layer."""
    import torch

    if len({tensor.shape for tensor in tensors}) > 1:
        raise ValueError("expected the same shape for Q, K and V")
    return torch.cat(tensors)


def _flat(gamma: Tensor) -> Tensor:
    """Turn the factors of a LayerScale, (1, 1, 1, D), into (D)."""
    if gamma.dim() != 4 or gamma.shape[:3] != (1, 1, 1):
        raise ValueError("expected (1, 1, 1, D)")
    return gamma.flatten()


def known_unused(spec: RMTSpec) -> dict[str, str]:
    counters = {r".+\.num_batches_tracked": "the number of training steps of a BatchNorm"}
    angles = {r"layers\.\d+\.Relpos\.angle": "angles that the release of 2023 stores and does not read"}
    return counters if spec.rotates else counters | angles


def known_images(shapes: Shapes, hints: LoadHints, spec: RMTSpec) -> KnownImages:
    mean, std = (_numbers(shapes.record.args.get(name), spec.channels) for name in ("mean", "std"))
    if not mean or not std or min(std) <= 0:
        return KnownImages()
    return KnownImages(mean=mean, std=std, origins={"mean": "mean of args", "std": "std of args"})


def _numbers(value: object, count: int) -> tuple[float, ...] | None:
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    return tuple(float(x) for x in value) if all(type(x) in (int, float) for x in value) else None


RELEASED = CheckpointSource(
    name="the paper authors' code of RMT",
    signature=(
        r"patch_embed\.proj\.0\.weight$",
        r"layers\.0\.Relpos\.decay$",
        r"layers\.0\.blocks\.0\.retention\.q_proj\.weight$",
    ),
    spec=infer_spec,
    tensors=tensor_origins,
    known_unused=known_unused,
    images=known_images,
    own_hints=("decomposed_stages",),
)


def _network() -> Network:
    from gmmvit_deploy.models.families.rmt import folding, model

    return Network(
        build=model.RMT,
        folding_passes=(
            folding.merge_batch_norms,
            folding.merge_scale_into_keys,
            folding.merge_branch_scales,
            folding.merge_residual_convolutions,
            folding.fold_rotations,
            folding.merge_token_weight,
            folding.share_decays,
        ),
        engine_passes=(folding.join_rows,),
        mistakes=model.MISTAKES,
    )


def _blocks(spec: RMTSpec) -> tuple[str, ...]:
    names = stage_blocks(spec.depths, first="stem", between="stages.{}.downsampling")
    return (*names, "projection") if spec.projection_dim else names


RMT = Family(
    name="rmt",
    spec=RMTSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("decay",),
    blocks=_blocks,
)
