"""The paper's five networks in float64 numpy with plain loops, written from the formulas alone.

It shares no code with the library: heads, masks, patches and windows are indexed here with plain loops.
"""

from __future__ import annotations

import math

import numpy as np

from gmmvit_deploy.models.families.cait.spec import CaiTSpec
from gmmvit_deploy.models.families.pit.spec import PiTSpec
from gmmvit_deploy.models.families.swin.spec import SwinSpec
from gmmvit_deploy.models.families.t2t.spec import T2TSpec
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec

State = dict[str, np.ndarray]


def logits_of(spec: ModelSpec, state: State, image: np.ndarray) -> np.ndarray:
    """Return logits (C,) of a normalised image (3, S, S)."""
    network = {ViTSpec: vit, SwinSpec: swin, CaiTSpec: cait, PiTSpec: pit, T2TSpec: t2t}[type(spec)]
    exact = {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in state.items()}
    return network(spec, exact, image.astype(np.float64))


def mask_of(mask: MaskSpec, state: State, prefix: str, *, heads: int, grid: int) -> np.ndarray:
    """(H, N, N), from alpha, sigma and the stored base, or from distances, or the learned matrix."""
    tokens = grid**2
    out = np.ones((heads, tokens, tokens))
    if mask.kind == "plain":
        return out
    for head in range(heads):
        for i in range(tokens):
            for j in range(tokens):
                if mask.kind == "elm":
                    out[head, i, j] = state[f"{prefix}.weight"][i, j]
                    continue
                total = 0.0
                for kernel in range(mask.kernels):
                    column = 0 if mask.shared else head
                    alpha = state[f"{prefix}.alpha"][kernel, column, 0, 0]
                    sigma = state[f"{prefix}.sigma"][kernel, column, 0, 0]
                    if mask.closed_form:
                        rows, columns = i // grid - j // grid, i % grid - j % grid
                        total += alpha * math.exp(-(rows**2 + columns**2) / (2 * sigma**2 + 2e-5))
                    else:
                        total += alpha * state[f"{prefix}.base"][0, 0, i, j] ** (1 / (sigma**2 + 1e-5))
                out[head, i, j] = total
    return out


def linear(state: State, name: str, x: np.ndarray) -> np.ndarray:
    out = x @ state[f"{name}.weight"].T
    return out + state[f"{name}.bias"] if f"{name}.bias" in state else out


def norm(state: State, name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def mlp(state: State, name: str, x: np.ndarray) -> np.ndarray:
    hidden = linear(state, f"{name}.0", x)
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    return linear(state, f"{name}.2", hidden)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


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


def convolved_patches(state: State, name: str, image: np.ndarray, patch: int) -> np.ndarray:
    """(3, S, S) → (N, D) by a p×p convolution of stride p, as sums over its window."""
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    grid = image.shape[1] // patch
    out = np.zeros((grid * grid, len(weight)))
    for token in range(grid * grid):
        top, left = (token // grid) * patch, (token % grid) * patch
        window = image[:, top : top + patch, left : left + patch]
        for d in range(len(weight)):
            out[token, d] = (weight[d] * window).sum() + bias[d]
    return out


def attended(
    state: State, name: str, x: np.ndarray, mask: np.ndarray, head_dim: int, bias: np.ndarray | None = None
) -> np.ndarray:
    """Compute self-attention with stacked q, k, v, head by head and query by query; then its output projection."""
    projected, heads = linear(state, f"{name}.qkv", x), len(mask)
    inner = heads * head_dim
    out = np.zeros((len(x), inner))
    for head in range(heads):
        at = slice(head * head_dim, (head + 1) * head_dim)
        query, key, value = (projected[:, part * inner : (part + 1) * inner][:, at] for part in range(3))
        for i in range(len(x)):
            scores = np.array([mask[head, i, j] * (query[i] @ key[j]) * head_dim**-0.5 for j in range(len(x))])
            out[i, at] = softmax(scores if bias is None else scores + bias[head, i]) @ value
    return linear(state, f"{name}.out", out) if f"{name}.out.weight" in state else out


def block(state: State, name: str, x: np.ndarray, mask: np.ndarray, head_dim: int) -> np.ndarray:
    x = x + attended(state, f"{name}.attention", norm(state, f"{name}.attention_norm", x), mask, head_dim)
    return x + mlp(state, f"{name}.mlp", norm(state, f"{name}.mlp_norm", x))


def vit(spec: ViTSpec, state: State, image: np.ndarray) -> np.ndarray:
    x = linear(state, "patch_embedding.project", patches(image, spec.patch_size))
    if spec.class_token:
        x = np.concatenate([state["class_token"][0], x])
    x = x + state["position_embedding"][0]
    for i in range(spec.depth):
        if spec.mask.kind == "plain":
            mask = np.ones((spec.heads, len(x), len(x)))
        else:
            prefix = f"blocks.{i}.attention.scores.before.mask"
            mask = mask_of(spec.mask, state, prefix, heads=spec.heads, grid=spec.grid)
        x = block(state, f"blocks.{i}", x, mask, spec.head_dim)
    pooled = x[0] if spec.class_token else x.mean(0)
    return linear(state, "head", norm(state, "head_norm", pooled))


def swin(spec: SwinSpec, state: State, image: np.ndarray) -> np.ndarray:
    x = norm(state, "patch_norm", convolved_patches(state, "patch_embedding", image, spec.patch_size))
    x = x + state["position_embedding"][0]
    for stage, depth in enumerate(spec.depths):
        grid, heads = spec.grids[stage], spec.heads[stage]
        for b in range(depth):
            name = f"stages.{stage}.blocks.{b}"
            shift = spec.window // 2 if b % 2 == 1 and grid > spec.window else 0
            normed = norm(state, f"{name}.attention_norm", x)
            x = x + _windows(spec, state, name, normed, grid, heads, shift)
            x = x + mlp(state, f"{name}.mlp", norm(state, f"{name}.mlp_norm", x))
        if stage < len(spec.depths) - 1:
            merged = []
            for row in range(0, grid, 2):
                for column in range(0, grid, 2):
                    corners = [(row, column), (row + 1, column), (row, column + 1), (row + 1, column + 1)]
                    merged.append(np.concatenate([x[r * grid + c] for r, c in corners]))
            x = linear(
                state, f"stages.{stage}.merge.reduce", norm(state, f"stages.{stage}.merge.norm", np.array(merged))
            )
    return linear(state, "head", norm(state, "norm", x).mean(0))


def _windows(spec: SwinSpec, state: State, name: str, x: np.ndarray, grid: int, heads: int, shift: int) -> np.ndarray:
    """Attention of every token to the tokens of its window in the rolled grid, of which only neighbours count."""
    window, scores = spec.window, f"{name}.attention.scores"
    mask = mask_of(spec.mask, state, f"{scores}.before.mask", heads=heads, grid=window)
    out = np.zeros_like(x)
    for top in range(0, grid, window):
        for left in range(0, grid, window):
            # where each token of this window stood before the roll
            places = [
                ((top + r + shift) % grid, (left + c + shift) % grid) for r in range(window) for c in range(window)
            ]
            wrapped = [
                (top + r + shift >= grid, left + c + shift >= grid) for r in range(window) for c in range(window)
            ]
            rows = [r * grid + c for r, c in places]
            bias = np.zeros((heads, window**2, window**2))
            for i in range(window**2):
                for j in range(window**2):
                    down = i // window - j // window + window - 1
                    across = i % window - j % window + window - 1
                    bias[:, i, j] = state[f"{scores}.before.bias.table"][down * (2 * window - 1) + across]
                    if wrapped[i] != wrapped[j]:
                        bias[:, i, j] -= 100
            out[rows] = attended(state, f"{name}.attention", x[rows], mask, x.shape[1] // heads, bias)
    return out


def cait(spec: CaiTSpec, state: State, image: np.ndarray) -> np.ndarray:
    x = linear(state, "patch_embedding.project", patches(image, spec.patch_size)) + state["position_embedding"][0]
    for i in range(spec.depth):
        name = f"patch_blocks.{i}"
        mask = mask_of(spec.mask, state, f"{name}.attention.inner.scores.before.mask", heads=spec.heads, grid=spec.grid)
        normed = norm(state, f"{name}.attention.norm", x)
        x = x + state[f"{name}.attention.gamma"][0, 0] * _talking(
            spec, state, f"{name}.attention.inner", normed, normed, mask
        )
        x = x + state[f"{name}.mlp.gamma"][0, 0] * mlp(state, f"{name}.mlp.inner", norm(state, f"{name}.mlp.norm", x))
    token = state["class_token"][0]
    for i in range(spec.class_depth):
        name = f"class_blocks.{i}"
        normed = norm(state, f"{name}.attention.norm", token)
        ones = np.ones((spec.heads, 1, len(x)))
        token = token + state[f"{name}.attention.gamma"][0, 0] * _talking(
            spec, state, f"{name}.attention.inner", normed, x, ones
        )
        token = token + state[f"{name}.mlp.gamma"][0, 0] * mlp(
            state, f"{name}.mlp.inner", norm(state, f"{name}.mlp.norm", token)
        )
    return linear(state, "head", norm(state, "head_norm", token[0]))


def _talking(
    spec: CaiTSpec, state: State, name: str, x: np.ndarray, context: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    heads, d = spec.heads, spec.head_dim
    query, pair = linear(state, f"{name}.query", x), linear(state, f"{name}.key_value", context)
    key, value = pair[:, : heads * d], pair[:, heads * d :]
    before, after = (state[f"{name}.scores.{side}.mixing.weight"] for side in ("before", "after"))
    out = np.zeros((len(x), heads * d))
    for i in range(len(x)):
        scores = np.zeros((heads, len(context)))
        for h in range(heads):
            at = slice(h * d, (h + 1) * d)
            for j in range(len(context)):
                scores[h, j] = mask[h, i, j] * (query[i, at] @ key[j, at]) * d**-0.5
        mixed = np.array([sum(scores[h] * before[h, g] for h in range(heads)) for g in range(heads)])
        weights = np.array([softmax(row) for row in mixed])
        weights = np.array([sum(weights[h] * after[h, g] for h in range(heads)) for g in range(heads)])
        for g in range(heads):
            at = slice(g * d, (g + 1) * d)
            out[i, at] = weights[g] @ value[:, at]
    return linear(state, f"{name}.out", out)


def pit(spec: PiTSpec, state: State, image: np.ndarray) -> np.ndarray:
    x = convolved_patches(state, "patch_embedding", image, spec.patch_size)
    x = np.concatenate([state["class_token"][0], x]) + state["position_embedding"][0]
    for stage, depth in enumerate(spec.depths):
        grid, heads = spec.grids[stage], spec.heads[stage]
        for b in range(depth):
            name = f"stages.{stage}.{b}"
            mask = np.ones((heads, len(x), len(x)))
            prefix = f"{name}.attention.scores.before.mask.patches"
            mask[:, 1:, 1:] = mask_of(spec.mask, state, prefix, heads=heads, grid=grid)
            x = block(state, name, x, mask, spec.head_dim)
        if stage < len(spec.depths) - 1:
            token = linear(state, f"poolings.{stage}.class_token", x[:1])
            x = np.concatenate([token, _pooled(state, f"poolings.{stage}", x[1:], grid)])
    return linear(state, "head", norm(state, "head_norm", x[0]))


def _pooled(state: State, name: str, x: np.ndarray, grid: int) -> np.ndarray:
    weight, bias = state[f"{name}.depthwise.weight"], state[f"{name}.depthwise.bias"]
    half = (grid + 1) // 2
    out = np.zeros((half * half, len(weight)))
    for i in range(half):
        for j in range(half):
            for channel in range(len(weight)):
                total = bias[channel]
                for r in range(3):
                    for c in range(3):
                        row, column = 2 * i + r - 1, 2 * j + c - 1
                        if 0 <= row < grid and 0 <= column < grid:
                            total += weight[channel, 0, r, c] * x[row * grid + column, channel // 2]
                out[i * half + j, channel] = total
    return out @ state[f"{name}.pointwise.weight"][:, :, 0, 0].T + state[f"{name}.pointwise.bias"]


def t2t(spec: T2TSpec, state: State, image: np.ndarray) -> np.ndarray:
    x = _unfolded(image)
    for step in range(spec.token_layers):
        name, grid = f"token_transformers.{step}", spec.grids[step]
        mask = mask_of(spec.mask, state, f"{name}.scores.before.mask", heads=1, grid=grid)[0]
        projected = linear(state, f"{name}.qkv", norm(state, f"{name}.attention_norm", x))
        query, key, value = np.split(projected, 3, axis=1)
        mixed = np.zeros_like(value)
        for i in range(len(x)):
            scores = [mask[i, j] * (query[i] @ key[j]) * x.shape[1] ** -0.5 for j in range(len(x))]
            mixed[i] = softmax(np.array(scores)) @ value
        x = linear(state, f"{name}.out", mixed) + value
        x = x + mlp(state, f"{name}.mlp", norm(state, f"{name}.mlp_norm", x))
        x = _unfolded(x.T.reshape(-1, grid, grid))
    x = linear(state, "project", x) + state["position_embedding"][0]
    for i in range(spec.depth):
        name = f"blocks.{i}"
        mask = mask_of(spec.mask, state, f"{name}.attention.scores.before.mask", heads=spec.heads, grid=spec.grids[-1])
        normed = norm(state, f"{name}.attention_norm", x)
        x = x + attended(state, f"{name}.attention", normed, mask, spec.head_dim) + normed
        x = x + mlp(state, f"{name}.mlp", norm(state, f"{name}.mlp_norm", x))
    return linear(state, "head", norm(state, "norm", x).mean(0))


def _unfolded(lattice: np.ndarray) -> np.ndarray:
    """(c, S, S) → (S²/4, 9c): channel, then row, then column of each 3×3 neighbourhood at stride 2."""
    channels, side, _ = lattice.shape
    half = side // 2
    out = np.zeros((half * half, channels * 9))
    for i in range(half):
        for j in range(half):
            for channel in range(channels):
                for r in range(3):
                    for c in range(3):
                        row, column = 2 * i + r - 1, 2 * j + c - 1
                        if 0 <= row < side and 0 <= column < side:
                            out[i * half + j, channel * 9 + r * 3 + c] = lattice[channel, row, column]
    return out
