"""Check that each attention is a single GPU kernel, and that each matrix product runs in the promised data type.

The engine's precision promises a data type for each matrix product, according to the role of the node, which says what
the node is for (`graphs.roles`). The checks compare the ONNX graph with the layers that TensorRT lists. The builder's
verbose log and the engine inspector print the same lines:

    Name: _gemm_mha_v2_myl0_10, LayerType: kgen, Inputs: [ { Name: …, Datatype: Half, … } ],
    Constants: [ … ], Outputs: [ … ], TacticName: …, StreamId: 0,
    Metadata: [ONNX Layer: blocks.0.attention/MatMul][ONNX Layer: blocks.0.attention/Softmax]…

The number in ``_myl0_`` is the index of the optimisation profile (a range of batch sizes). The metadata lists the ONNX
nodes that the layer computes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gmmvit_deploy.errors import EngineError
from gmmvit_deploy.inference.precision import SPECS, Precision

if TYPE_CHECKING:
    from gmmvit_deploy.graphs.declared import Attention
    from gmmvit_deploy.inference.precision import Role

_LINE = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: (?P<inputs>.*?), "
    r"(?:Constants: .*?, )?Outputs: (?P<outputs>.*?), (?P<rest>(?:Parameter|Tactic|StreamId|Metadata).*)$"
)
_TYPE = re.compile(r"Datatype: ([^,}\]]+)")
_ONNX = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_PROFILE = re.compile(r"_myl(\d+)_\d+$|\[profile (\d+)\]")
_PRODUCTS = frozenset({"gemm", "gemv", "correlation", "convolution", "runtime_fusion"})
# Pattern in TensorRT's name of a data type → this project's name; the first pattern that matches is used. For fp16,
# TensorRT 11 and TensorRT for RTX print "Half"; TensorRT 10 prints "Half" or "Row major linear FP16 format".
_NAMES = (
    (re.compile(r"bfloat16|bf16", re.IGNORECASE), "bf16"),
    (re.compile(r"half|fp16", re.IGNORECASE), "fp16"),
    (re.compile(r"uint8", re.IGNORECASE), "uint8"),
    (re.compile(r"int8", re.IGNORECASE), "int8"),
    (re.compile(r"fp8", re.IGNORECASE), "fp8"),
    (re.compile(r"float|fp32", re.IGNORECASE), "fp32"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of an engine: a GPU kernel, or a step on the host.

    kind: TensorRT's name for it.  profile: the index of the optimisation profile.  nodes: the ONNX nodes it computes.
    reads, writes: the data types of the inputs without constants, and of the outputs; empty for shape arithmetic.
    """

    name: str
    kind: str
    profile: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def precision(self) -> str | None:
        """The narrowest data type of the inputs, or of the outputs without inputs; None for shape arithmetic."""
        types = self.reads or self.writes
        return min(types, key=_bits) if types else None

    @property
    def multiplies(self) -> bool:
        """True if the layer computes a matrix product or a convolution, alone or fused with other nodes."""
        return self.kind in _PRODUCTS or "mha" in self.name


def _bits(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def layers_from_text(text: str) -> tuple[Layer, ...]:
    """Read all layers, in the order of the text.  Errors: EngineError when the text lists none."""
    layers = tuple(_layer(match) for line in text.splitlines() if (match := _LINE.match(line)))
    if not layers:
        raise EngineError("TensorRT listed no layers, so attentions and precision cannot be checked")
    return layers


def _layer(match: re.Match[str]) -> Layer:
    name = match["name"]
    profile = _PROFILE.search(name)
    return Layer(
        name=name,
        kind=match["kind"].strip(),
        profile=int(profile[1] or profile[2]) if profile else 0,
        reads=_types(match["inputs"]),
        writes=_types(match["outputs"]),
        nodes=tuple(dict.fromkeys(_ONNX.findall(match["rest"]))),
    )


def _types(text: str) -> tuple[str, ...]:
    """Return our names of the data types in the text; others, such as int64, are omitted."""
    named = (next((name for pattern, name in _NAMES if pattern.search(kind)), "") for kind in _TYPE.findall(text))
    return tuple(name for name in named if name)


def shares_of(layers: Iterable[Layer]) -> dict[str, float]:
    """Map each data type to the fraction of the layers with this precision; shape arithmetic is not counted."""
    counts = Counter(kind for layer in layers if (kind := layer.precision))
    return {kind: count / counts.total() for kind, count in counts.most_common()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProof:
    """The layers that compute an attention, in a given optimisation profile on a given target.

    target: the compute capability to build for, or the name of the GPU that built the engine.
    fused: True if a single GPU kernel computes the whole attention, from Q Kᵀ to P V, and no other layer a part of it.
    kernels: the names of the layers that compute the attention or a part of it.
    precision: the data types that its matrix products read, separated by commas.
    reason: why the attention is not fused, as far as known; empty if it is.
    """

    name: str
    target: str
    profile: int
    masked: bool
    fused: bool
    kernels: tuple[str, ...]
    precision: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A matrix product or convolution that runs in another data type than the precision promises.

    node: the name of the ONNX node.  target, profile: as in `AttentionProof`.
    """

    node: str
    target: str
    profile: int
    expected: str
    actual: str


def prove_attentions(
    layers: Sequence[Layer],
    attentions: Sequence[Attention],
    *,
    target: str,
    profiles: int,
    head_dims: Mapping[str, int],
) -> tuple[AttentionProof, ...]:
    """Check every attention in every profile; in a profile without layers, no attention is fused.

    profiles: their number.  head_dims: name of an attention → its head dim, where it is known.
    """
    by_profile = [[layer for layer in layers if layer.profile == profile] for profile in range(profiles)]
    return tuple(
        _prove(here, attention, target, profile, head_dims.get(attention.name))
        for profile, here in enumerate(by_profile)
        for attention in attentions
    )


def _prove(
    layers: Sequence[Layer], attention: Attention, target: str, profile: int, head_dim: int | None
) -> AttentionProof:
    nodes = set(attention.nodes)
    parts = [layer for layer in layers if nodes & set(layer.nodes)]
    whole = [layer for layer in parts if nodes <= set(layer.nodes)]
    fused = attention.known and len(parts) == 1 == len(whole)
    products = [layer.precision for layer in parts if layer.multiplies and layer.precision]
    return AttentionProof(
        name=attention.name,
        target=target,
        profile=profile,
        masked=attention.mask is not None,
        fused=fused,
        kernels=tuple(layer.name for layer in parts),
        precision=", ".join(dict.fromkeys(products)) or "unknown",
        reason="" if fused else _reason(attention, len(parts), bool(whole), set(products), head_dim),
    )


def _reason(attention: Attention, parts: int, whole: bool, types: Set[str], head_dim: int | None) -> str:
    """Return why an attention in ``parts`` layers is not fused.  whole: one of them computes all of it."""
    if not attention.known:
        return "this softmax is not part of a known form of attention"
    if not parts:
        return "no layer of the engine lists the attention's nodes"
    if whole:
        return (
            f"a single kernel, but other layers ({parts - 1}) pad and cut its head dim {head_dim}: "
            "type gmmvit convert with --pad-heads"
        )
    if attention.normalises_heads:
        return "a norm over the heads follows its softmax: no fused kernel computes this norm"
    if attention.mixes_heads and attention.mask is not None:
        return (
            "its heads are mixed around softmax, and each head has its own mask: "
            "an equal form without mixing does not exist"
        )
    if types == {"fp32"}:
        return "it runs in float32: fused kernels exist for fp16, bf16 and fp8"
    if attention.mixes_heads:
        return (
            "its heads are mixed around softmax, which no fused kernel computes; gmmvit convert removes the mixing "
            "only of CaiT, with one mask for all heads and heads times head dim of at most 256"
        )
    if head_dim is not None and (head_dim < 16 or head_dim > 256):
        return f"head dim {head_dim}: fused kernels take 16 to 256; type gmmvit convert with --pad-heads if below 16"
    return f"the builder split it into {parts} kernels"


def unreached(
    layers: Sequence[Layer],
    roles: Mapping[str, Role],
    precision: Precision,
    *,
    target: str,
    profiles: int,
    not_quantized: Collection[str] = (),
) -> tuple[Miss, ...]:
    """Return the matrix products and convolutions that run in another data type than ``precision`` promises.

    roles: node → role.  profiles: their number.  not_quantized: the projections that an int8 graph leaves in fp16.
    """
    promised = {node: kind for node, role in roles.items() if (kind := _promised(role, precision))}
    promised |= dict.fromkeys(not_quantized, _promised("product", precision))
    misses = []
    for profile in range(profiles):
        here = [layer for layer in layers if layer.profile == profile]
        for node, expected in promised.items():
            actual = _type_of(node, here)
            if actual != expected:
                misses.append(Miss(node=node, target=target, profile=profile, expected=expected, actual=actual))
    return tuple(misses)


def _promised(role: Role, precision: Precision) -> str:
    """Return the data type in which an operator of this role must run; "" if none is promised."""
    if role == "projection":
        return _SHORT[SPECS[precision].projection]
    return _SHORT[SPECS[precision].element] if role in ("product", "embedding") else ""


_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "fp8"}


def _type_of(node: str, layers: Sequence[Layer]) -> str:
    holding = [layer for layer in layers if node in layer.nodes and layer.precision]
    # A kernel that only adds a bias or multiplies by a scale can also list the node of the matrix product. Only the
    # data type of the kernel that computes the matrix product is checked.
    fused = [layer for layer in holding if layer.multiplies and "mha" in layer.name]
    computing = [layer for layer in holding if layer.multiplies and layer not in fused] or fused or holding
    kinds = dict.fromkeys(str(layer.precision) for layer in computing)
    return ", ".join(kinds) or "no reported type"
