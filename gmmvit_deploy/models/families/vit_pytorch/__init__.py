"""vit-pytorch: the networks DeepViT, ViT, SimpleViT and small-data ViT of a widely copied library.

to_patch_embedding.1                     Linear; later releases: 1 LayerNorm, 2 Linear, 3 LayerNorm
to_patch_embedding.to_patch_tokens       small-data ViT: 1 LayerNorm, 2 Linear
pos_embedding, cls_token                 (1, N, D), (1, 1, D); latest ViT: (N, D), (1, D), or (0, D) without class token
transformer.layers.{i}.0                 attention: to_qkv, to_out.0 (SimpleViT: to_out), reattn_weights, reattn_norm.1,
                                         temperature
transformer.layers.{i}.1                 mlp
transformer.norm                         a norm of all tokens; later releases of ViT and SimpleViT
mlp_head or linear_head                  Linear; or 0 LayerNorm, 1 Linear

The two styles of names store the same network:

norm inside     layers.{i}.0.norm, layers.{i}.0.to_qkv;  layers.{i}.1.net.0 (the norm), net.1, net.4 (SimpleViT: net.3)
PreNorm         layers.{i}.0.norm, layers.{i}.0.fn.to_qkv;  layers.{i}.1.norm, layers.{i}.1.fn.net.0, fn.net.3
                (DeepViT: layers.{i}.0.fn.norm, layers.{i}.0.fn.fn.to_qkv, and so on)

Files of a ViT in the PreNorm style without norms in the patch embedding belong to the family ``vit``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

from gmmvit_deploy.models.families.family import Family, LastBlock, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.sources.hints import POOLS, LoadHints, Pool
from gmmvit_deploy.models.sources.released import VIEWS
from gmmvit_deploy.models.sources.shapes import Shapes, asked_pool, image_of_patches, infer_heads, known_pool
from gmmvit_deploy.models.sources.source import CheckpointSource, Conversion, TensorOrigins, batched, renamed, within
from gmmvit_deploy.models.specs import MaskKind, MaskSpec, PatchSpec, require, require_counts

AttentionKind = Literal["plain", "reattention", "lsa"]
"""plain: softmax(Q Kᵀ/√d).  reattention: softmax, head mixing, LayerNorm over the heads (DeepViT).  lsa: a learned
temperature for each layer and a masked diagonal (locality self-attention of the small-data ViT)."""
EmbeddingKind = Literal["linear", "normed", "shifted"]
"""linear: a linear layer.  normed: LayerNorm, linear layer, LayerNorm.  shifted: LayerNorm and a linear layer on the
image and four copies that are shifted by a pixel (shifted patch tokenization of the small-data ViT)."""
OutputKind = Literal["bias", "no bias", "absent"]
"""The output projection of the attention: a linear layer with a bias, without a bias, or absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitPytorchSpec(PatchSpec):
    """A vision transformer of vit-pytorch on square images cut into square patches.

    class_token: True if a class token precedes the patches.
    stored_positions: True if the file holds the position embeddings, False for sinusoids.
    pool: the head reads the class token (``cls``), or the mean of all tokens, including the class token (``mean``).
    final_norm: True if a norm of all tokens follows the last block.  head_norm: True if a norm follows the pooling.
    """

    family: ClassVar[str] = "vit_pytorch"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain",)
    head_dim: int
    attention: AttentionKind
    embedding: EmbeddingKind
    output: OutputKind
    class_token: bool
    stored_positions: bool
    pool: Pool
    final_norm: bool
    head_norm: bool

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require_counts(self, "head_dim")
        for name, values in (
            ("attention", get_args(AttentionKind)),
            ("embedding", get_args(EmbeddingKind)),
            ("output", get_args(OutputKind)),
            ("pool", POOLS),
        ):
            value = getattr(self, name)
            require(value in values, f"{name}: expected one of {', '.join(values)}, got {value!r}")
        require(self.class_token or self.pool == "mean", "pool cls: expected a class token, but the model has none")
        require(
            self.output != "absent" or (self.heads == 1 and self.head_dim == self.dim),
            "only attention with a single head of the full width has no output projection",
        )
        require(
            self.stored_positions or (not self.class_token and self.dim % 4 == 0 and self.dim >= 8),
            "sinusoidal positions: expected a width that is a multiple of 4 and at least 8, and no class token, got "
            f"the width {self.dim}{' and a class token' if self.class_token else ''}",
        )

    @property
    def description(self) -> str:
        names: dict[AttentionKind, str] = {"reattention": "DeepViT", "lsa": "small-data ViT"}
        return f"vit-pytorch {names.get(self.attention, 'ViT' if self.stored_positions else 'SimpleViT')}"


_LAYERS = "transformer.layers"
_SHIFTED = "to_patch_embedding.to_patch_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The names of a network's tensors in the files of a release.

    attention: the kind of attention of the network.
    outer: what wraps the norm and the branch: ``fn.`` for DeepViT in the PreNorm style, otherwise empty.
    norm_inside: True if the attention and the mlp contain their norms.
    simple: True for SimpleViT, whose modules have no dropout between the layers.
    """

    attention: AttentionKind
    outer: str = ""
    norm_inside: bool = True
    simple: bool = False

    @property
    def branch(self) -> str:
        """The prefix of the layers of a branch."""
        return self.outer if self.norm_inside else f"{self.outer}fn."

    @property
    def first(self) -> str:
        """The prefix of the layers of the first attention."""
        return f"{_LAYERS}.0.0.{self.branch}"

    @property
    def out(self) -> str:
        return "to_out" if self.simple else "to_out.0"

    @property
    def head(self) -> str:
        return "linear_head" if self.simple else "mlp_head"

    def mlp(self) -> dict[str, str]:
        """Return name in the model → name in the file, for the norm and the linear layers of an mlp."""
        if self.norm_inside:
            last = "net.3" if self.simple else "net.4"
            return {"mlp_norm": "1.net.0", "mlp.0": "1.net.1", "mlp.2": f"1.{last}"}
        return {
            "mlp_norm": f"1.{self.outer}norm",
            "mlp.0": f"1.{self.branch}net.0",
            "mlp.2": f"1.{self.branch}net.3",
        }


def infer_spec(shapes: Shapes, hints: LoadHints, *, style: Style) -> VitPytorchSpec:
    embedding, linear = _embedding(shapes)
    dim, values = shapes.of(f"{linear}.weight", rank=2)
    class_token, latest = _class_token(shapes)
    stored = not style.simple
    views = VIEWS if embedding == "shifted" else 1
    grid = _stored_grid(shapes, class_token=class_token) if stored else None
    image_size, channels, patch_size = image_of_patches(
        shapes.source, hints, name=linear, values=values // views, grid=grid
    )
    inner_dim = shapes.of(f"{style.first}to_qkv.weight", rank=2)[0] // 3
    output = _output(shapes, style, single=inner_dim == dim)
    heads = _heads(shapes, hints, style, inner_dim=inner_dim, single=output == "absent")
    bare_head = f"{style.head}.weight" in shapes
    return VitPytorchSpec(
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        classes=shapes.of(f"{style.head}.weight" if bare_head else f"{style.head}.1.weight", rank=2)[0],
        dim=dim,
        depth=shapes.count(r"transformer\.layers\.(\d+)\.[01]\."),
        heads=heads,
        head_dim=inner_dim // heads,
        mlp_dim=shapes.of(f"{_LAYERS}.0.{style.mlp()['mlp.0']}.weight", rank=2)[0],
        attention=style.attention,
        embedding=embedding,
        output=output,
        class_token=class_token,
        stored_positions=stored,
        pool=_pool(shapes, hints, class_token=class_token, latest=latest),
        final_norm="transformer.norm.weight" in shapes,
        head_norm=not bare_head,
        mask=MaskSpec(),
    )


def _embedding(shapes: Shapes) -> tuple[EmbeddingKind, str]:
    if f"{_SHIFTED}.1.weight" in shapes:
        return "shifted", f"{_SHIFTED}.2"
    if "to_patch_embedding.2.weight" in shapes or "to_patch_embedding.3.weight" in shapes:
        return "normed", "to_patch_embedding.2"
    return "linear", "to_patch_embedding.1"


def _class_token(shapes: Shapes) -> tuple[bool, bool]:
    """Return whether the network has a class token, and whether the token has the shape of the latest ViT.

    In the latest ViT, the token has the shape (1, D), or (0, D) in a network that pools the mean of the patches.
    """
    if "cls_token" not in shapes:
        return False, False
    shape = tuple(shapes.tensors["cls_token"].shape)
    return shape[0:1] != (0,), len(shape) == 2


def _stored_grid(shapes: Shapes, *, class_token: bool) -> int:
    name = "pos_embedding"
    rank = 2 if name in shapes and shapes.tensors[name].dim() == 2 else 3
    positions = shapes.of(name, rank=rank)[-2]
    where = f"{name} without the class token" if class_token else f"{name}, in a file without cls_token,"
    return shapes.grid(positions - int(class_token), where=where)


def _output(shapes: Shapes, style: Style, *, single: bool) -> OutputKind:
    """Return the kind of the output projection, which only a ViT with Q as wide as the tokens can lack."""
    out = f"{style.first}{style.out}"
    if f"{out}.weight" in shapes and f"{out}.bias" not in shapes and style.simple:
        return "no bias"
    return "absent" if single and style.attention == "plain" and f"{out}.weight" not in shapes else "bias"


def _heads(shapes: Shapes, hints: LoadHints, style: Style, *, inner_dim: int, single: bool) -> int:
    known, evidence = None, ""
    if style.attention == "reattention":
        known = shapes.of(f"{style.first}reattn_weights", rank=2)[0]
        evidence = "the number of heads in the head mixing matrices of the file is"
    elif single:
        known, evidence = 1, "the file has no output projection, so the number of heads is"
    return infer_heads(shapes, hints, width=inner_dim, shown=(known, evidence))


def _pool(shapes: Shapes, hints: LoadHints, *, class_token: bool, latest: bool) -> Pool:
    if not class_token:
        return known_pool(shapes.source, hints, pool="mean", evidence="the file has no class token, so the pooling is")
    if latest:
        evidence = "the class token has the shape of the latest vit-pytorch, so the pooling is"
        return known_pool(shapes.source, hints, pool="cls", evidence=evidence)
    return asked_pool(shapes.source, hints)


def tensor_origins(spec: VitPytorchSpec, names: Iterable[str], *, style: Style) -> TensorOrigins:
    ours, theirs = "blocks.{}", f"{_LAYERS}.{{}}"
    attention = {
        "qkv": "to_qkv",
        "out": style.out,
        "scores.before.temperature.temperature": "temperature",
        "scores.after.mixing.weight": "reattn_weights",
        "scores.after.norm": "reattn_norm.1",
    }
    linear = {"linear": "1", "normed": "2", "shifted": "to_patch_tokens.2"}[spec.embedding]
    norm = "to_patch_tokens.1" if spec.embedding == "shifted" else "1"
    embedding = {"patch_norm": norm, "project": linear, "token_norm": "3"}
    table: dict[str, str | Conversion] = {
        **within("patch_embedding", "to_patch_embedding", embedding),
        "position_embedding": Conversion(keys=("pos_embedding",), convert=batched),
        "class_token": Conversion(keys=("cls_token",), convert=batched),
        f"{ours}.attention_norm": f"{theirs}.0.{style.outer}norm",
        **{f"{ours}.attention.{a}": f"{theirs}.0.{style.branch}{z}" for a, z in attention.items()},
        **within(ours, theirs, style.mlp()),
        "final_norm": "transformer.norm",
        "head_norm": f"{style.head}.0",
        "head": f"{style.head}.1" if spec.head_norm else style.head,
    }
    return renamed(names, table)


def known_unused(spec: VitPytorchSpec) -> dict[str, str]:
    return {} if spec.class_token else {"cls_token": "an empty class token: the network has no class token"}


_REATTENTION = r"transformer\.layers\.\d+\.0\.(fn\.fn\.)?reattn_"
_TEMPERATURE = r"transformer\.layers\.\d+\.0\.(fn\.)?temperature$"
_INSIDE = r"transformer\.layers\.0\.0\.to_qkv\."
_PRENORM = r"transformer\.layers\.0\.0\.fn\.to_qkv\."
_RESIDUAL_PRENORM = r"transformer\.layers\.0\.0\.fn\.fn\.to_qkv\."
_SIMPLE_HEAD = r"linear_head\."


def _source(name: str, style: Style, *own: str, absent: tuple[str, ...] = ()) -> CheckpointSource:
    """Return the source of a network in a style of names.  own: patterns that only its names fit."""
    return CheckpointSource(
        name=f"vit-pytorch's {name}",
        signature=(r"to_patch_embedding\.", r"transformer\.layers\.", *own),
        absent=absent,
        spec=partial(infer_spec, style=style),
        tensors=partial(tensor_origins, style=style),
        known_unused=known_unused,
        own_hints=("pool",),
        option="vit-pytorch",
    )


SOURCES = (
    _source("DeepViT", Style(attention="reattention"), _INSIDE, _REATTENTION),
    _source(
        "DeepViT in the PreNorm style",
        Style(attention="reattention", outer="fn.", norm_inside=False),
        _RESIDUAL_PRENORM,
        _REATTENTION,
    ),
    _source("ViT", Style(attention="plain"), _INSIDE, absent=(_REATTENTION, _TEMPERATURE, _SIMPLE_HEAD)),
    _source(
        "ViT in the PreNorm style with norms in the patch embedding",
        Style(attention="plain", norm_inside=False),
        _PRENORM,
        r"to_patch_embedding\.[23]\.",
        absent=(_REATTENTION, _TEMPERATURE),
    ),
    _source("SimpleViT", Style(attention="plain", simple=True), _INSIDE, _SIMPLE_HEAD),
    _source("small-data ViT", Style(attention="lsa"), _INSIDE, _TEMPERATURE),
    _source("small-data ViT in the PreNorm style", Style(attention="lsa", norm_inside=False), _PRENORM, _TEMPERATURE),
)
"""The sources of all networks and styles of names.  A file belongs to at most one source with the most patterns."""


def _network() -> Network:
    from gmmvit_deploy.models.families.vit_pytorch import folding
    from gmmvit_deploy.models.families.vit_pytorch.mistakes import MISTAKES
    from gmmvit_deploy.models.families.vit_pytorch.model import VitPytorch

    return Network(
        build=VitPytorch,
        folding_passes=(
            folding.centre_head_mixing,
            folding.merge_head_norm_into_values,
            folding.merge_scale_into_query,
        ),
        mistakes=MISTAKES,
    )


def _last_block(spec: VitPytorchSpec) -> LastBlock | None:
    if spec.pool == "mean" and spec.final_norm:
        return None  # the norm stands between the block and the mean, and does not commute with the mean
    return last_of_blocks(spec, "first" if spec.pool == "cls" else "mean")


VIT_PYTORCH = Family(
    name="vit_pytorch",
    spec=VitPytorchSpec,
    network=_network,
    sources=SOURCES,
    mask_kinds=("plain",),
    blocks=plain_blocks,
    last_block=_last_block,
)
