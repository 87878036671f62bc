"""Mistakes with DeepViT's Re-attention, scale adjustment and BatchNorms, planted in an exported graph.

Folding merges everything behind the head mixing into a matrix M and factors f of the mean of V:

M[g, h] = c_g · Θ[g, h],    f[g] = N · (c_g · (θ_g − μ_g) + s · β_g),    c_g = s · γ_g / √(σ²_g + ε)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import numpy as np

from tests.models.families.small_models import Small
from tests.planted.graph import GraphCopy, Planted, changed
from tests.planted.locality import family
from tests.planted.rmt import other_epsilon

MODEL = Small(family("deepvit"), "plain")


class Steps(TypedDict):
    """The trained steps behind the head mixing: Θ (H, H), θ, γ, μ, σ² and β (H), ε and s."""

    mixing: np.ndarray
    offset: np.ndarray
    gamma: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    beta: np.ndarray
    epsilon: float
    scale: float


Change = Callable[[Steps], object]


def _behind_softmax(change: Change) -> Callable[[GraphCopy], None]:
    """Return a function that changes the trained steps, and merges them as folding does."""

    def plant(graph: GraphCopy) -> None:
        spec = graph.model.spec
        for node in graph.find("MatMul", r".*\.scores\.after\.mixing"):
            after = graph.module(node).removesuffix(".mixing")
            steps = Steps(
                mixing=graph.trained[f"{after}.mixing.weight"].T,  # the module stores [old head, new head]
                offset=graph.trained[f"{after}.bias.bias"],
                gamma=graph.trained[f"{after}.norm.weight"],
                mean=graph.trained[f"{after}.norm.running_mean"],
                variance=graph.trained[f"{after}.norm.running_var"],
                beta=graph.trained[f"{after}.norm.bias"],
                epsilon=1e-5,
                scale=spec.head_dim**-0.5,
            )
            factors = graph.only("Mul", after.removesuffix(".scores.after"))
            for layer, merged in zip((node, factors), _merged(steps, spec.tokens), strict=True):
                np.testing.assert_allclose(graph.constant(layer), merged, rtol=1e-5, atol=1e-6)
            change(steps)
            for layer, merged in zip((node, factors), _merged(steps, spec.tokens), strict=True):
                graph.feed(layer, merged)

    return plant


def _merged(steps: Steps, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    factor = steps["scale"] * steps["gamma"] / np.sqrt(steps["variance"] + steps["epsilon"])
    offset = factor * (steps["offset"] - steps["mean"]) + steps["scale"] * steps["beta"]
    return factor[:, None] * steps["mixing"], tokens * offset[:, None]


def _no_norm(steps: Steps) -> None:
    steps["gamma"], steps["variance"] = np.ones_like(steps["gamma"]), 1 - steps["epsilon"] + 0 * steps["gamma"]
    steps["mean"] = steps["beta"] = np.zeros_like(steps["gamma"])


def _scale_adjustment(*, norms: bool) -> Callable[[GraphCopy], None]:
    """Return a function that removes a from the last layers of the branches, and from the epsilons of the norms."""

    def plant(graph: GraphCopy) -> None:
        a = graph.model.spec.scale_adjustment
        for operator in ("MatMul", "Add"):
            changed(operator, r"blocks\.\d+\.(attention\.out|mlp\.2)", lambda values: a * values)(graph)
        if norms:
            for node in graph.find("LayerNormalization", r"blocks\.\d+\.(attention|mlp)_norm"):
                (epsilon,) = (attribute.f for attribute in node.attribute if attribute.name == "epsilon")
                graph.set_attribute(node, "epsilon", epsilon * a**2)

    return plant


def _epsilon_of_stem(graph: GraphCopy) -> None:
    for index in range(2):
        other_epsilon(graph, f"stem.norms.{index}", f"stem.convolutions.{index}", 1e-3)


def _every_epsilon(graph: GraphCopy) -> None:
    _epsilon_of_stem(graph)
    _behind_softmax(lambda steps: steps.update(epsilon=1e-3))(graph)


_BEHIND_SOFTMAX: dict[str, Change] = {
    "head mixing transposed": lambda steps: steps.update(mixing=steps["mixing"].T),
    "no head mixing": lambda steps: steps.update(mixing=np.eye(len(steps["mixing"]))),
    "no bias after the head mixing": lambda steps: steps.update(offset=np.zeros_like(steps["offset"])),
    "no BatchNorm over the heads": _no_norm,
    "BatchNorm over the heads with an epsilon of 0.001": lambda steps: steps.update(epsilon=1e-3),
    "BatchNorm over the heads with an epsilon of 1e-06": lambda steps: steps.update(epsilon=1e-6),
    "the transform scale left out": lambda steps: steps.update(scale=1.0),
}

CASES = [
    *(Planted(MODEL, _behind_softmax(change), name) for name, change in _BEHIND_SOFTMAX.items()),
    Planted(
        MODEL,
        changed("MatMul", r".*\.scores\.after\.mixing", np.transpose),
        "head mixing transposed after folding has merged BatchNorm into the head mixing",
    ),
    Planted(MODEL, _scale_adjustment(norms=True), "the scale adjustment left out"),
    Planted(MODEL, _scale_adjustment(norms=False), "the branches not divided by the scale adjustment"),
    Planted(MODEL, changed("Mul", r".*\.scores\.before\.scale", np.ones_like), "1/√d missing"),
    Planted(MODEL, changed("Mul", r".*\.scores\.before\.scale", np.square), "1/√d applied twice"),
    Planted(MODEL, _epsilon_of_stem, "BatchNorm of the stem with an epsilon of 0.001"),
    Planted(MODEL, _every_epsilon, "every BatchNorm with an epsilon of 0.001"),
]
