"""The proof of engines, on layers written by hand, so that it also meets cases that no build here produces."""

from __future__ import annotations

import pytest

from gmmvit_deploy.graphs.declared import Attention
from gmmvit_deploy.runtimes.engines.layers import Layer, layers_from_text, prove_attentions, unreached

LINE = (
    "Name: {name}, LayerType: {kind}, Inputs: [ {{ Name: a, Dimensions: [-1,64,16], Strides: [16,-1,1], "
    "StrideOrder: [1,2,0], Datatype: {reads}, Format: (Linear) Row major linear format }}], Constants: [ "
    "{{ Name: c, Dimensions: [1,3,64,64], Datatype: Float, Format: (Linear) }}], Outputs: [ {{ Name: b, "
    "Dimensions: [-1], Datatype: {writes}, Format: (Arbitrary) Format with stride order = [1,2,0] }}], "
    "TacticName: {name}_0xdb02, StreamId: 0, Metadata: {nodes}"
)
ATTENTION = Attention(name="a", nodes=("qk", "mask", "softmax", "pv"), mask="m")


def line(name: str, *nodes: str, kind: str = "kgen", reads: str = "Half", writes: str = "Half") -> str:
    return LINE.format(
        name=name, kind=kind, reads=reads, writes=writes, nodes="".join(f"[ONNX Layer: {node}]" for node in nodes)
    )


def layers(*lines: str) -> tuple[Layer, ...]:
    return layers_from_text("\n".join(("Layers:", *lines, "", "I/O Tensors:", " Name: pixels, IOMode: Input")))


SPLIT = [line("g_myl0_0", "qk", kind="gemm"), line("h_myl0_1", "pv", kind="gemm")]


@pytest.mark.parametrize(
    ("lines", "attention", "head_dims", "reason"),
    [
        (
            [line("pad_myl0_0", "qk"), line("_gemm_mha_v2_myl0_1", "pv", "softmax", "mask", "qk")],
            ATTENTION,
            {"a": 12},
            "a single kernel, but other layers (1) pad and cut its head dim 12: type gmmvit convert with --pad-heads",
        ),
        (
            SPLIT,
            Attention(name="a", nodes=("qk", "softmax", "mix", "pv"), mixes_heads=True),
            {"a": 32},
            "its heads are mixed around softmax, which no fused kernel computes",
        ),
        (
            SPLIT,
            Attention(name="a", nodes=("qk", "softmax", "mix", "norm", "pv"), mixes_heads=True, normalises_heads=True),
            {"a": 16},
            "a norm over the heads follows its softmax",
        ),
        (SPLIT, ATTENTION, {"a": 32}, "the builder split it into 2 kernels"),
        ([line("other_myl0_0", "z")], ATTENTION, {}, "no layer of the engine lists the attention's nodes"),
        (
            [line("_gemm_mha_v2_myl0_1", "softmax")],
            Attention(name="a", nodes=("softmax",), known=False),
            {},
            "not part of a known form of attention",
        ),
    ],
)
def test_an_attention_that_is_not_fused_has_a_reason(
    lines: list[str], attention: Attention, head_dims: dict[str, int], reason: str
) -> None:
    (proof,) = prove_attentions(layers(*lines), [attention], target="8.9", profiles=1, head_dims=head_dims)
    assert not proof.fused
    assert reason in proof.reason


def test_every_profile_is_judged_on_its_own() -> None:
    fused = line("_gemm_mha_v2_myl0_1", "pv", "softmax", "mask", "qk")
    split = [line("g_myl1_0", "qk", kind="gemm"), line("h_myl1_1", "mask", "softmax", "pv", kind="gemm")]
    proofs = prove_attentions(layers(fused, *split), [ATTENTION], target="8.9", profiles=3, head_dims={})
    assert [(proof.profile, proof.fused) for proof in proofs] == [(0, True), (1, False), (2, False)]
    assert proofs[2].reason == "no layer of the engine lists the attention's nodes"


ROLES = {"p": "projection", "qk": "product", "e": "embedding", "n": "norm"}


def test_a_promise_that_was_kept() -> None:
    built = layers(
        line("p_myl0_0", "p", kind="gemm", reads="Int8"),
        line("finish_myl0_1", "p", reads="Half"),  # the product's scale and bias, in a kernel after it
        line("_gemm_mha_v2_myl0_2", "qk", "p"),
        line("e_myl0_3", "e", kind="correlation"),
        line("n_myl0_4", "n", reads="Float"),
    )
    assert unreached(built, ROLES, "int8", target="8.9", profiles=1) == ()
    (miss,) = unreached(built, ROLES, "int8", target="8.9", profiles=1, not_quantized=["p"])
    assert (miss.expected, miss.actual) == ("fp16", "int8")


@pytest.mark.parametrize(
    ("lines", "node", "promised", "seen"),
    [
        ([line("p_myl0_0", "p", kind="runtime_fusion", reads="Float")], "p", "int8", "fp32"),
        ([], "p", "int8", "no reported type"),
    ],
)
def test_a_promise_that_was_broken(lines: list[str], node: str, promised: str, seen: str) -> None:
    others = [line("_gemm_mha_v2_myl0_2", "qk"), line("e_myl0_3", "e", kind="correlation")]
    (miss,) = unreached(layers(*lines, *others), ROLES, "int8", target="8.9", profiles=1)
    assert (miss.node, miss.expected, miss.actual, miss.target) == (node, promised, seen, "8.9")
