"""Classify an image with a bundle's model, and measure the attention: mean attention distances, attention rollout.

    image → preprocessing of the bundle → trained model in float64 → labels; weights → distances of each head, rollout

The mean attention distance is computed for every attention between the tokens of a grid, also within windows. The
rollout multiplies the weights of all layers. This product has a meaning only if every attention is between all tokens
of the same sequence, and if its weights are shares: not negative, with rows that sum to 1. For any other model, the
result holds the reason in place of a rollout.

A[h, i, j] is the weight with which the query token i attends to the key token j in head h. The tokens are P prefix
tokens, for example a class token, and then the patches of a grid, row by row.

    distance[h] = mean over the patches i of  Σ_j A[h, i, j] · d_ij / Σ_j A[h, i, j]        j: the patches
    d_ij = √((Δrow · height)² + (Δcolumn · width)²)        between the centres of patches of height × width

    R = Â_L … Â_1        Â: A' + I, each row divided by its sum        A'[i, j]: the mean of A[h, i, j] over the heads

R[i, j] is the share of the input token j in the token i after L blocks. The identity I stands for the residual
connection. For weights whose rows sum to 1, Â = (A' + I) / 2.
Sources: Dosovitskiy et al., "An Image is Worth 16x16 Words", section 4.5 (distance) and appendix D.8 (rollout); Abnar
and Zuidema, "Quantifying Attention Flow in Transformers" (rollout).
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.images.data.other_formats import pixels_of_file
from gmmvit_deploy.images.resize_rules import STATE_PREPROCESSING
from gmmvit_deploy.inference.labels import LabelSet, Prediction
from gmmvit_deploy.inference.preprocess import UnusableImage
from gmmvit_deploy.models.layers.attention import attentions_without_scores
from gmmvit_deploy.reports.pictures.attention_weights import AttentionRecord, LayerWeights, attention_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.models.layers.model import Model
    from gmmvit_deploy.models.layers.token_grids import TokenGrids

TOP = 5
"""Number of labels that an answer lists; of a multi-label network, also all further labels that are present."""
_UNMARKED_PREFIXES = (0, 1, 2)  # a sequence of patches can have a class token, and a distillation token


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDistances:
    """The mean attention distances of the heads of a layer, over its ``sequences``, such as windows.

    grid: (rows, columns) of the tokens of a sequence, after ``prefix`` tokens that are left out.
    patches, pixels: of each head, in steps of the grid and in pixels of the input; None for a head whose patches attend
    only to the prefix.
    """

    layer: str
    grid: tuple[int, int]
    prefix: int
    sequences: int
    patches: tuple[float | None, ...]
    pixels: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageRollout:
    """The attention rollout for an image.

    values: (rows, columns), the share of each patch in the tokens that the head of the model reads (``reads``).
    prefix_share: the share of the prefix tokens; ``values`` and ``prefix_share`` sum to 1.
    """

    values: NDArray[np.float64]
    prefix_share: float
    reads: str

    def to_json(self) -> dict[str, Any]:
        return {"values": self.values.tolist(), "prefix_share": self.prefix_share, "reads": self.reads}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageAttention:
    """The answer of a model for an image, and its attention.

    predictions: the likeliest labels, with distinct names; empty for a network without logits.
    no_distances: attention → why it has no distances.  rollout: or None, with the reason in no_rollout.
    """

    predictions: tuple[Prediction, ...]
    distances: tuple[HeadDistances, ...]
    no_distances: Mapping[str, str]
    rollout: ImageRollout | None
    no_rollout: str

    def to_json(self) -> dict[str, Any]:
        return {
            "predictions": [guess.to_json() for guess in self.predictions],
            "distances": [asdict(layer) for layer in self.distances],
            "no_distances": dict(self.no_distances),
            "rollout": None if self.rollout is None else self.rollout.to_json(),
            "no_rollout": self.no_rollout,
        }


def attention_of_bundle(bundle: Bundle, image: Path) -> tuple[Model, NDArray[Any], ImageAttention]:
    """Return (trained model in float64, pixels, attention) for an image file; pixels: uint8 (height, width, channels).

    Errors: ImageError for the file; InputError when the bundle has no mean and std, or its class is not permitted;
    BundleError, CheckpointError when its weights cannot be read, or do not fit the manifest.
    """
    import torch

    from gmmvit_deploy.checkpoints.weights import model_from_bundle

    manifest = bundle.manifest
    if manifest.image.normalisation is None:
        raise InputError(
            f"{bundle.path}: the bundle has no mean and std, which are needed to normalise the image for the model",
            hint=STATE_PREPROCESSING,
        )
    try:
        pixels = pixels_of_file(image.read_bytes(), manifest.image)
    except OSError as exc:
        raise ImageError(f"{image}: the file cannot be read: {exc.strerror or exc}") from exc
    except UnusableImage as exc:
        raise ImageError(f"{image}: the image cannot be used: {exc}") from exc
    tensor = torch.from_numpy(manifest.image.tensor_from_pixels(pixels[None]))
    model = model_from_bundle(manifest, bundle.weights_path).double()
    # The code of a user's own class may print; stdout holds the data of a command.
    with contextlib.redirect_stdout(sys.stderr):
        record = attention_record(model, tensor.double())
    size = (manifest.image.height, manifest.image.width)
    attention = attention_of_image(
        model, record, observed=model.observed_grids(), size=size, label_set=manifest.label_set
    )
    return model, pixels, attention


def attention_of_image(
    model: Model,
    record: AttentionRecord,
    *,
    observed: TokenGrids | None,
    size: tuple[int, int],
    label_set: LabelSet,
) -> ImageAttention:
    """Return the answer, the distances and the rollout of a run of ``model``.

    observed: ``model.observed_grids()``.  size: (height, width) of the input.  label_set: empty without logits.
    """
    places = {} if observed is None else {place.module: place for place in observed.placements}
    distances, without = [], dict.fromkeys(attentions_without_scores(model), _NO_SCORES)
    for refusal in () if observed is None else observed.refusals:
        without[refusal.module or "the network"] = refusal.reason
    grids: dict[str, tuple[int, tuple[int, int]]] = {}
    for layer in record.layers:
        unit = (1, 1)
        if observed is None:
            place = _prefix_and_grid(layer)
        elif (known := places.get(_path_in_network(layer.layer))) is not None:
            place, unit = (known.prefix, known.grid), known.unit
        else:
            place = None
        if layer.queries != layer.keys:
            without[layer.layer] = f"{_count(layer.queries, 'query token')} attends to {layer.keys} key tokens"
        elif place is None:
            without[layer.layer] = f"the positions of the {layer.keys} tokens are not known"
        else:
            grids[layer.layer] = place
            distances.append(_distances(layer, *place, unit=unit, size=size))
    reason = _why_no_rollout(model, record, observed, grids)
    named = replace(label_set, labels=label_set.names)
    return ImageAttention(
        predictions=named.predictions(record.logits, TOP) if named.labels else (),
        distances=tuple(distances),
        no_distances=without,
        rollout=None if reason else _rollout(record, *grids[record.layers[-1].layer]),
        no_rollout=reason,
    )


_NO_SCORES = "the attention is not between tokens: it has no Q Kᵀ"


def _prefix_and_grid(layer: LayerWeights) -> tuple[int, tuple[int, int]] | None:
    """Return (prefix, (rows, columns)) of a sequence of a network of this package, whose images are square, or None."""
    for prefix in _UNMARKED_PREFIXES:
        patches = layer.keys - prefix
        side = math.isqrt(max(patches, 0))
        grid = (side, side) if layer.grid is None else layer.grid
        if patches == math.prod(grid) > 0:
            return prefix, grid
    return None


def _path_in_network(layer: str) -> str:
    """Return the path of the module that calls the fused attention function, for the name of an answered attention."""
    return layer.removeprefix("network.").rpartition(".")[0]


def _distances(
    layer: LayerWeights,
    prefix: int,
    grid: tuple[int, int],
    *,
    unit: tuple[int, int],
    size: tuple[int, int],
) -> HeadDistances:
    """Return the distances of a layer.  unit: between neighbours of the grid, in positions of the feature map."""
    (rows, columns), (height, width) = grid, size
    if layer.sequences == 1:
        patch = (height / rows, width / columns)
    else:  # the sequences divide the image, so that each position covers the same square
        side = math.sqrt(height * width / (layer.sequences * rows * columns))
        patch = (side * unit[0], side * unit[1])
    return HeadDistances(
        layer=layer.layer,
        grid=grid,
        prefix=prefix,
        sequences=layer.sequences,
        patches=_plain(mean_attention_distance(layer.weights, grid, prefix=prefix)),
        pixels=_plain(mean_attention_distance(layer.weights, grid, prefix=prefix, patch=patch)),
    )


def _plain(values: NDArray[np.float64]) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in values.tolist())


def _why_no_rollout(
    model: Model,
    record: AttentionRecord,
    observed: TokenGrids | None,
    grids: Mapping[str, tuple[int, tuple[int, int]]],
) -> str:
    external = attentions_without_scores(model)
    if external:
        return f"{external[0]} is no attention between tokens: it has no Q Kᵀ"
    if observed is not None and observed.refusals:
        return f"not every attention is between the tokens of a known grid: {observed.refusals[0]}"
    if observed is not None and observed.poolings:
        return f"{observed.poolings[0]} reads the tokens by an attention with a single query token"
    if not record.layers:
        return "the network has no attention whose weights gmmvit computes"
    first = record.layers[0]
    for layer in record.layers:
        if layer.steps_after:
            return (
                f"{layer.layer} changes the weights after softmax ({', '.join(layer.steps_after)}), so weights can be "
                "negative, and a row need not sum to 1"
            )
        if layer.sequences > 1:
            return f"{layer.layer} divides the tokens into {layer.sequences} sequences, for example windows"
        if layer.queries != layer.keys:
            return f"in {layer.layer}, {_count(layer.queries, 'query token')} attends to {layer.keys} key tokens"
        if layer.keys != first.keys:
            return f"the number of tokens changes: {first.layer} has {first.keys}, and {layer.layer} has {layer.keys}"
        if layer.layer not in grids:
            return f"the positions of the {layer.keys} tokens of {layer.layer} are not known"
    return model.why_no_rollout() or (
        "" if record.read else f"the logits do not depend on the weights of {record.layers[-1].layer}"
    )


def _rollout(record: AttentionRecord, prefix: int, grid: tuple[int, int]) -> ImageRollout:
    shares = rollout([layer.weights[0] for layer in record.layers])[list(record.read)].mean(axis=0)
    return ImageRollout(
        values=shares[prefix:].reshape(grid),
        prefix_share=float(shares[:prefix].sum()),
        reads=_in_words(record.read, prefix, prefix + math.prod(grid)),
    )


def _in_words(read: tuple[int, ...], prefix: int, tokens: int) -> str:
    if read == tuple(range(prefix, tokens)):
        return f"the mean of the {tokens - prefix} patches"
    if read == tuple(range(tokens)):
        return f"the mean of all {tokens} tokens"
    if len(read) == 1:
        return f"token {read[0]}" + (", before the patches" if read[0] < prefix else "")
    if len(read) <= prefix:
        return f"the mean of the tokens {', '.join(map(str, read))}"
    return f"the mean of {len(read)} of {tokens} tokens"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def mean_attention_distance(
    weights: NDArray[Any], grid: tuple[int, int], *, prefix: int = 0, patch: tuple[float, float] = (1.0, 1.0)
) -> NDArray[np.float64]:
    """Return the mean attention distance of each head, (H,); NaN for a head whose patches attend only to the prefix.

    weights: non-negative, (H, N, N), or (sequences, H, N, N), N = prefix + rows · columns.
    patch: (height, width) of a patch, in the unit of the result.
    """
    heads, patches = weights.shape[-3], math.prod(grid)
    between = weights[..., prefix:, prefix:].astype(np.float64).reshape(-1, heads, patches, patches)
    down, right = (np.subtract.outer(places, places) for places in np.indices(grid).reshape(2, -1))
    distances = np.hypot(down * patch[0], right * patch[1])
    total = between.sum(axis=-1)
    # A patch that attends only to the prefix tokens has no distance.
    reached = total > 0
    means = np.divide((between * distances).sum(axis=-1), total, out=np.zeros_like(total), where=reached)
    count = reached.sum(axis=(0, 2))
    result: NDArray[np.float64] = np.divide(
        means.sum(axis=(0, 2)), count, out=np.full(len(count), np.nan), where=count > 0
    )
    return result


def rollout(layers: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Return the attention rollout R, (N, N); each row sums to 1.  layers: A of each layer, (H, N, N), in order."""
    result = identity = np.eye(layers[0].shape[-1])
    for layer in layers:
        residual = layer.astype(np.float64).mean(axis=0) + identity
        result = (residual / residual.sum(axis=-1, keepdims=True)) @ result
    return result
