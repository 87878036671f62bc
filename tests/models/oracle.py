"""The ViT of the paper in float64 numpy with plain loops, written from the formulas alone.

It shares no code with the library: heads, masks and patches are indexed here one by one.
"""

from __future__ import annotations

import math

import numpy as np

from gmmvit_deploy.specs import ViTSpec


def masks_from_formula(spec: ViTSpec, state: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    """(H, N, N), from alpha, sigma and the stored base, or from distances, or the learned matrix."""
    tokens = spec.grid**2
    mask = np.ones((spec.heads, tokens, tokens))
    if spec.mask.kind == "plain":
        return np.ones((spec.heads, spec.tokens, spec.tokens))
    for head in range(spec.heads):
        for i in range(tokens):
            for j in range(tokens):
                if spec.mask.kind == "elm":
                    mask[head, i, j] = state[f"{prefix}.weight"][i, j]
                    continue
                total = 0.0
                for kernel in range(spec.mask.kernels):
                    column = 0 if spec.mask.shared else head
                    alpha = float(state[f"{prefix}.alpha"][kernel, column, 0, 0])
                    sigma = float(state[f"{prefix}.sigma"][kernel, column, 0, 0])
                    if spec.mask.closed_form:
                        rows = i // spec.grid - j // spec.grid
                        columns = i % spec.grid - j % spec.grid
                        total += alpha * math.exp(-(rows**2 + columns**2) / (2 * sigma**2 + 2e-5))
                    else:
                        base = float(state[f"{prefix}.base"][0, 0, i, j])
                        total += alpha * base ** (1 / (sigma**2 + 1e-5))
                mask[head, i, j] = total
    return mask


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def patches(image: np.ndarray, patch: int) -> np.ndarray:
    """(3, S, S) → (N, p·p·3): rows, then columns, then channels."""
    grid = image.shape[1] // patch
    out = np.zeros((grid * grid, patch * patch * 3))
    for token in range(grid * grid):
        top, left = (token // grid) * patch, (token % grid) * patch
        for row in range(patch):
            for column in range(patch):
                for channel in range(3):
                    out[token, (row * patch + column) * 3 + channel] = image[channel, top + row, left + column]
    return out


def attention(x: np.ndarray, qkv: np.ndarray, mask: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """(N, D) → (N, H·d), one head and one query at a time."""
    projected = x @ qkv.T
    inner = heads * head_dim
    out = np.zeros((len(x), inner))
    for head in range(heads):
        at = slice(head * head_dim, (head + 1) * head_dim)
        query, key, value = (projected[:, part * inner : (part + 1) * inner][:, at] for part in range(3))
        for i in range(len(x)):
            scores = np.array([mask[head, i, j] * (query[i] @ key[j]) * head_dim**-0.5 for j in range(len(x))])
            weights = np.exp(scores - scores.max())
            out[i, at] = (weights / weights.sum()) @ value
    return out


def vit_logits(spec: ViTSpec, state: dict[str, np.ndarray], image: np.ndarray) -> np.ndarray:
    """Logits (C,) of one normalised image (3, S, S)."""
    state = {name: values.astype(np.float64) for name, values in state.items()}
    x = patches(image.astype(np.float64), spec.patch_size) @ state["patch_embedding.project.weight"].T
    x = x + state["patch_embedding.project.bias"]
    if spec.class_token:
        x = np.concatenate([state["class_token"][0], x])
    x = x + state["position_embedding"][0]
    for i in range(spec.depth):
        block = f"blocks.{i}"
        mask = masks_from_formula(spec, state, f"{block}.attention.mask")
        normed = layer_norm(x, state[f"{block}.attention_norm.weight"], state[f"{block}.attention_norm.bias"])
        mixed = attention(normed, state[f"{block}.attention.qkv.weight"], mask, spec.heads, spec.head_dim)
        if f"{block}.attention.out.weight" in state:
            mixed = mixed @ state[f"{block}.attention.out.weight"].T + state[f"{block}.attention.out.bias"]
        x = x + mixed
        normed = layer_norm(x, state[f"{block}.mlp_norm.weight"], state[f"{block}.mlp_norm.bias"])
        hidden = gelu(normed @ state[f"{block}.mlp.0.weight"].T + state[f"{block}.mlp.0.bias"])
        x = x + hidden @ state[f"{block}.mlp.2.weight"].T + state[f"{block}.mlp.2.bias"]
    pooled = x[0] if spec.class_token else x.mean(0)
    pooled = layer_norm(pooled, state["head_norm.weight"], state["head_norm.bias"])
    return pooled @ state["head.weight"].T + state["head.bias"]
