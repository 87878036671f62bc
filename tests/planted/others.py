"""Mistakes in EANet and in the tutorial's ViT, planted in exported graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import helper

from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.specs import MaskSpec
from tests.models.families.small_models import Small
from tests.planted.graph import GraphCopy, Other, Planted, changed
from tests.planted.locality import family

_WEIGHTS = r".*\.weights"


def _softmax_over_slots(*, biases: bool) -> Callable[[GraphCopy], None]:
    """Return a function that runs the softmax over the slots of a head.

    biases: True adds the biases that folding drops, because a softmax over the tokens ignores the biases.
    """

    def plant(graph: GraphCopy) -> None:
        for node in graph.find("Softmax", _WEIGHTS):
            bias = _dropped_bias(graph, graph.module(node).removesuffix(".weights")) if biases else np.zeros(1)
            graph.become(node, "Add", node.input[0], bias)
        for node in graph.find("ReduceSum", _WEIGHTS):
            over_slots = graph.insert(node, "Softmax", node.input[0], axis=-1)
            graph.only("Div", graph.module(node)).input[0] = node.input[0] = over_slots

    return plant


def _dropped_bias(graph: GraphCopy, attention: str) -> np.ndarray:
    """Return L₀ b + l₀ of each head; the attentions of the token transformers have no such bias."""
    if f"{attention}.to_slots.bias" not in graph.trained:
        return np.zeros(1)
    memory, bias = (graph.trained[f"{attention}.to_slots.{name}"] for name in ("weight", "bias"))
    projected = graph.trained[f"{attention}.project.bias"].reshape(-1, memory.shape[1])
    return (projected @ memory.T + bias).flatten()


def _no_slot_sum(graph: GraphCopy) -> None:
    for node in graph.find("Div", _WEIGHTS):
        graph.become(node, "Identity", node.input[0])


def _memory_without_strides(graph: GraphCopy) -> None:
    """Read the second memory M₁ (T, slots), which files store transposed, in the order of the storage.

    Folding merges the memory with the linear layer behind it, Wᵀ = (W_out M₁)ᵀ.
    """
    for node in graph.find("MatMul", r"token_transformers\.\d+\.out"):
        out = graph.trained[f"{graph.module(node)}.weight"]
        memory = graph.trained[graph.module(node).replace(".out", ".from_slots.weight")]
        np.testing.assert_allclose(graph.constant(node), (out @ memory).T, atol=1e-5)
        graph.feed(node, (out @ np.ascontiguousarray(memory.T).reshape(memory.shape)).T)


def _softmax_at_the_end(graph: GraphCopy) -> None:
    head = graph.only("Gemm", "head")
    head.output[0] = "head.logits"
    graph.nodes.append(helper.make_node("Softmax", ["head.logits"], ["logits"], name="head/Softmax", axis=-1))


def _no_normalised_embedding(graph: GraphCopy) -> None:
    division = graph.only("Div", "network")
    graph.become(division, "Identity", division.input[0])


_TOWER = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
ZERO_SHOT = Other(
    family("hugging_face"),
    "plain",
    "zero-shot",
    HuggingFaceSpec(
        architecture="SiglipModel",
        config={"vision_config": _TOWER},
        image_size=16,
        classes=5,
        mask=MaskSpec(),
        prompts=("a photo of a {}",),
    ),
)
TUTORIAL = Small(family("naive_vit"), "plain")

CASES = [
    Planted(ZERO_SHOT, _no_normalised_embedding, "the image embedding not normalised"),
    Planted("eanet_tied_cpu", _softmax_over_slots(biases=True), "softmax over the slots in place of the tokens"),
    Planted(
        "eanet_tied_cpu",
        _softmax_over_slots(biases=False),
        "softmax over the slots in place of the tokens, without the biases that folding drops",
    ),
    Planted("eanet_tied_cpu", _no_slot_sum, "no division by the sum over the slots"),
    Planted(
        "eanet_tied_cpu",
        _memory_without_strides,
        "the second memory of the token transformers read without its strides",
    ),
    Planted(TUTORIAL, _softmax_at_the_end, "the softmax of training in place of the logits"),
    Planted(
        TUTORIAL,
        changed("Add", "model", lambda positions: np.roll(positions, 1, axis=1)),
        "positions counted from the first patch",
    ),
]
