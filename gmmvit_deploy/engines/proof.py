"""Is each attention one kernel, and does each product run in the type it was promised?

Judged by the layers that TensorRT reports, never by the graph that went in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gmmvit_deploy.engines.layers import Layer

if TYPE_CHECKING:
    from gmmvit_deploy.graphs.roles import Attention, Role
    from gmmvit_deploy.precision import Precision

__all__ = ["AttentionProof", "Miss", "prove_attentions", "unreached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProof:
    """One attention in one profile, for one target.

    target: compute capability or GPU.  fused: one kernel computes it from Q Kᵀ to P V, and no other
    layer has a part in it.  kernels: the layers that have.  precision: what its products read.
    reason: why it is not fused, as far as that is known; empty when it is.
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
    """A product that does not run in the type that it was promised."""

    node: str
    target: str
    profile: int
    wanted: str
    found: str


def prove_attentions(
    layers: Sequence[Layer],
    attentions: Iterable[Attention],
    *,
    target: str,
    profiles: int,
    head_dims: Mapping[str, int],
    unmatched: Mapping[str, str] | None = None,
) -> tuple[AttentionProof, ...]:
    """For each of as many profiles: one that ``layers`` say nothing of proves nothing.

    unmatched: attention that is not known → why its form is not that of an attention; it ends the proof's reason.
    """
    found = tuple(attentions)
    proofs = [
        _prove([layer for layer in layers if layer.profile == profile], attention, target, profile, head_dims)
        for profile in range(profiles)
        for attention in found
    ]
    unknown = {attention.name for attention in found if not attention.known}
    words = {name: why for name, why in (unmatched or {}).items() if name in unknown}
    return tuple(
        replace(proof, reason=f"{proof.reason}: {words[proof.name]}") if proof.name in words else proof
        for proof in proofs
    )


def _prove(
    layers: Sequence[Layer], attention: Attention, target: str, profile: int, head_dims: Mapping[str, int]
) -> AttentionProof:
    wanted = set(attention.nodes)
    parts = [layer for layer in layers if wanted & set(layer.nodes)]
    whole = [layer for layer in parts if wanted <= set(layer.nodes)]
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
        reason="" if fused else _reason(attention, parts, whole, products, head_dims.get(attention.name)),
    )


def _reason(
    attention: Attention,
    parts: Sequence[Layer],
    whole: Sequence[Layer],
    products: Sequence[str | None],
    head_dim: int | None,
) -> str:
    if not attention.known:
        return "no attention that we know stands around this softmax"
    if not parts:
        return "no layer says that it computes it"
    if whole:
        return (
            f"one kernel, between {len(parts) - 1} copies that pad and cut its head dim {head_dim}: "
            "convert with --pad-heads"
        )
    if attention.mixes_heads:
        return "its heads are mixed around softmax, and each has a mask of its own: no form without mixing exists"
    if set(products) == {"fp32"}:
        return "float32: fused kernels take fp16, bf16 and fp8"
    if head_dim is not None and (head_dim < 16 or head_dim > 256):
        return f"head dim {head_dim}: fused kernels take 16 to 256; convert with --pad-heads where it is too small"
    return f"the builder made {len(parts)} kernels of it"


_PROMISED: dict[Precision, dict[str, str]] = {
    "fp32": {"projection": "fp32", "product": "fp32", "embedding": "fp32"},
    "fp16": {"projection": "fp16", "product": "fp16", "embedding": "fp16"},
    "bf16": {"projection": "bf16", "product": "bf16", "embedding": "bf16"},
    "int8": {"projection": "int8", "product": "fp16", "embedding": "fp16"},
    "fp8": {"projection": "fp8", "product": "fp16", "embedding": "fp16"},
}


def unreached(
    layers: Sequence[Layer], roles: Mapping[str, Role], precision: Precision, *, target: str, profiles: int
) -> tuple[Miss, ...]:
    """Every product that runs in another type than ``precision`` promises, in every profile."""
    promised = {node: kind for node, role in roles.items() if (kind := _PROMISED[precision].get(role))}
    misses = []
    for profile in range(profiles):
        here = [layer for layer in layers if layer.profile == profile]
        for node, wanted in promised.items():
            found = _type_of(node, here)
            if found != wanted:
                misses.append(Miss(node=node, target=target, profile=profile, wanted=wanted, found=found))
    return tuple(misses)


def _type_of(node: str, layers: Sequence[Layer]) -> str:
    holding = [layer for layer in layers if node in layer.nodes and layer.precision]
    # A kernel that finishes a product (its bias, its scale) carries its name too; the product itself decides.
    fused = [layer for layer in holding if layer.multiplies and "mha" in layer.name]
    computing = [layer for layer in holding if layer.multiplies and layer not in fused] or fused or holding
    kinds = dict.fromkeys(str(layer.precision) for layer in computing)
    return ", ".join(kinds) or "nothing that TensorRT reports"
