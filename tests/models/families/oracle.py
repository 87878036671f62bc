"""The paper's five networks in float64 numpy, written from the formulas alone.  It shares no code with the library."""

from __future__ import annotations

import math

import numpy as np

from gmmvit_deploy.models.families.cait import CaiTSpec
from gmmvit_deploy.models.families.pit import PiTSpec
from gmmvit_deploy.models.families.swin import SwinSpec
from gmmvit_deploy.models.families.t2t import T2TSpec
from gmmvit_deploy.models.families.vit import ViTSpec
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
    if mask.kind == "plain":
        return np.ones((heads, tokens, tokens))
    if mask.kind == "elm":
        return np.broadcast_to(state[f"{prefix}.weight"], (heads, tokens, tokens))
    alpha, sigma = (state[f"{prefix}.{part}"][:, :, 0, 0] for part in ("alpha", "sigma"))
    out = np.zeros((heads, tokens, tokens))
    for head in range(heads):
        for kernel in range(mask.kernels):
            a, s = (values[kernel, 0 if mask.shared else head] for values in (alpha, sigma))
            if mask.closed_form:
                rows, columns = np.divmod(np.arange(tokens), grid)
                squared = (rows[:, None] - rows) ** 2 + (columns[:, None] - columns) ** 2
                out[head] += a * np.exp(-squared / (2 * s**2 + 2e-5))
            else:
                out[head] += a * state[f"{prefix}.base"][0, 0] ** (1 / (s**2 + 1e-5))
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
    return linear(state, f"{name}.2", hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def windows_of(image: np.ndarray, side: int, stride: int, padding: int = 0) -> np.ndarray:
    """(c, S, S) → (rows · columns, c, side, side): the windows at this stride, with zeros around the image."""
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    corners = range(0, padded.shape[1] - side + 1, stride)
    return np.array([padded[:, i : i + side, j : j + side] for i in corners for j in corners])


def patches(image: np.ndarray, patch: int) -> np.ndarray:
    """(3, S, S) → (N, p·p·3): rows, then columns, then channels."""
    return windows_of(image, patch, patch).transpose(0, 2, 3, 1).reshape(-1, patch * patch * len(image))


def convolved_patches(state: State, name: str, image: np.ndarray, patch: int) -> np.ndarray:
    """(3, S, S) → (N, D) by a p×p convolution of stride p."""
    windows = windows_of(image, patch, patch)
    return np.einsum("nchw,dchw->nd", windows, state[f"{name}.weight"]) + state[f"{name}.bias"]


def heads_of(x: np.ndarray, head_dim: int) -> np.ndarray:
    """(n, H·d) → (H, n, d)."""
    return np.array([x[:, at : at + head_dim] for at in range(0, x.shape[1], head_dim)])


def side_by_side(heads: np.ndarray) -> np.ndarray:
    """(H, n, d) → (n, H·d)."""
    return np.concatenate([*heads], axis=1)


def attended(
    state: State, name: str, x: np.ndarray, mask: np.ndarray, head_dim: int, bias: np.ndarray | float = 0.0
) -> np.ndarray:
    """Compute self-attention with stacked q, k, v; then its output projection, if there is one."""
    query, key, value = (heads_of(part, head_dim) for part in np.split(linear(state, f"{name}.qkv", x), 3, axis=1))
    scores = mask * (query @ key.swapaxes(1, 2)) * head_dim**-0.5 + bias
    out = side_by_side(softmax(scores) @ value)
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
        prefix = f"blocks.{i}.attention.scores.before.mask"
        plain = spec.mask.kind == "plain"
        x = block(
            state,
            f"blocks.{i}",
            x,
            np.ones((spec.heads, 1, 1))
            if plain
            else mask_of(spec.mask, state, prefix, heads=spec.heads, grid=spec.grid),
            spec.head_dim,
        )
    return linear(state, "head", norm(state, "head_norm", x[0] if spec.class_token else x.mean(0)))


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
            lattice = x.reshape(grid, grid, -1)
            quads = [lattice[r::2, c::2] for r, c in ((0, 0), (1, 0), (0, 1), (1, 1))]
            merged = np.concatenate(quads, axis=-1).reshape(grid**2 // 4, -1)
            x = linear(state, f"stages.{stage}.merge.reduce", norm(state, f"stages.{stage}.merge.norm", merged))
    return linear(state, "head", norm(state, "norm", x).mean(0))


def _windows(spec: SwinSpec, state: State, name: str, x: np.ndarray, grid: int, heads: int, shift: int) -> np.ndarray:
    """Attention of every token to the tokens of its window in the rolled grid, of which only neighbours count."""
    window, scores = spec.window, f"{name}.attention.scores"
    mask = mask_of(spec.mask, state, f"{scores}.before.mask", heads=heads, grid=window)
    rows, columns = np.divmod(np.arange(window**2), window)
    offsets = (rows[:, None] - rows + window - 1) * (2 * window - 1) + columns[:, None] - columns + window - 1
    table = state[f"{scores}.before.bias.table"][offsets].transpose(2, 0, 1)
    out = np.zeros_like(x)
    for top in range(0, grid, window):
        for left in range(0, grid, window):
            down, across = top + rows + shift, left + columns + shift  # before the roll
            tokens = down % grid * grid + across % grid
            wrapped = 2 * (down >= grid) + (across >= grid)
            bias = table - 100.0 * (wrapped[:, None] != wrapped)
            out[tokens] = attended(state, f"{name}.attention", x[tokens], mask, x.shape[1] // heads, bias)
    return out


def cait(spec: CaiTSpec, state: State, image: np.ndarray) -> np.ndarray:
    def after(name: str, x: np.ndarray, context: np.ndarray | None, mask: np.ndarray) -> np.ndarray:
        normed, inner = norm(state, f"{name}.attention.norm", x), f"{name}.attention.inner"
        mixed = _talking(spec, state, inner, normed, normed if context is None else context, mask)
        x = x + state[f"{name}.attention.gamma"][0, 0] * mixed
        return x + state[f"{name}.mlp.gamma"][0, 0] * mlp(
            state, f"{name}.mlp.inner", norm(state, f"{name}.mlp.norm", x)
        )

    x = linear(state, "patch_embedding.project", patches(image, spec.patch_size)) + state["position_embedding"][0]
    for i in range(spec.depth):
        prefix = f"patch_blocks.{i}.attention.inner.scores.before.mask"
        mask = mask_of(spec.mask, state, prefix, heads=spec.heads, grid=spec.grid)
        x = after(f"patch_blocks.{i}", x, None, mask)
    token = state["class_token"][0]
    for i in range(spec.class_depth):
        token = after(f"class_blocks.{i}", token, x, np.ones((spec.heads, 1, 1)))
    return linear(state, "head", norm(state, "head_norm", token[0]))


def _talking(
    spec: CaiTSpec, state: State, name: str, x: np.ndarray, context: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    query = heads_of(linear(state, f"{name}.query", x), spec.head_dim)
    pair = np.split(linear(state, f"{name}.key_value", context), 2, axis=1)
    key, value = (heads_of(part, spec.head_dim) for part in pair)
    before, after = (state[f"{name}.scores.{side}.mixing.weight"] for side in ("before", "after"))
    scores = mask * (query @ key.swapaxes(1, 2)) * spec.head_dim**-0.5
    weights = softmax(np.einsum("hij,hg->gij", scores, before))
    return linear(state, f"{name}.out", side_by_side(np.einsum("hij,hg->gij", weights, after) @ value))


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
    """A 3×3 depthwise convolution of stride 2, with two filters for each channel, then a 1×1 convolution."""
    windows = windows_of(x.T.reshape(-1, grid, grid), 3, 2, padding=1).repeat(2, axis=1)
    out = (windows * state[f"{name}.depthwise.weight"][:, 0]).sum((2, 3)) + state[f"{name}.depthwise.bias"]
    return out @ state[f"{name}.pointwise.weight"][:, :, 0, 0].T + state[f"{name}.pointwise.bias"]


def t2t(spec: T2TSpec, state: State, image: np.ndarray) -> np.ndarray:
    x = _unfolded(image)
    for step in range(spec.token_layers):
        name, grid = f"token_transformers.{step}", spec.grids[step]
        mask = mask_of(spec.mask, state, f"{name}.scores.before.mask", heads=1, grid=grid)[0]
        projected = linear(state, f"{name}.qkv", norm(state, f"{name}.attention_norm", x))
        query, key, value = np.split(projected, 3, axis=1)
        mixed = softmax(mask * (query @ key.T) * x.shape[1] ** -0.5) @ value
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
    return windows_of(lattice, 3, 2, padding=1).reshape(-1, 9 * len(lattice))
