"""Measure the patch embedding and the position embeddings of a model.

principal components of the filters F (D, n): the rows of Vᵀ in F − mean(F) = U S Vᵀ, largest singular value first
similarity of the positions p and q: p · q / (|p| |q|), and 0 if a position is zero
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from gmmvit_deploy.models.layers.embeddings import patch_filters, position_embeddings
from gmmvit_deploy.models.scores.masks import squared_distances
from gmmvit_deploy.reports.pictures.step_numbers import span_of

if TYPE_CHECKING:
    from torch import Tensor

    from gmmvit_deploy.models.layers.embeddings import PositionEmbeddings
    from gmmvit_deploy.models.layers.model import Model

LARGEST_SHEET = 64
"""A patch embedding with more filters is drawn by this number of principal components."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilterSheet:
    """The filters of a patch embedding, or their principal components.

    features: D, the number of filters.  drawn: (K, V · c, rows, columns), K at most 64.  views: V, the number of
    images.
    explained: the share of the variance that the K components hold; None if ``drawn`` are the filters.
    """

    name: str
    features: int
    drawn: NDArray[np.float32]
    views: int
    explained: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PositionSimilarity:
    """The cosine similarity of each position embedding to all others.

    grid: (rows, columns) of the patches, after ``prefix`` tokens.
    stored: False if the network computes the tensor from its sizes.
    similarity: (N, N), between the patches.  to_prefix: (prefix, N), of the prefix tokens to the patches.
    """

    name: str
    grid: tuple[int, int]
    prefix: int
    stored: bool
    similarity: NDArray[np.float32]
    to_prefix: NDArray[np.float32]

    def measured(self) -> dict[str, float | None]:
        """Return the mean of neighbours, and mean, minimum and maximum of all pairs; None without pairs."""
        distances = squared_distances(self.grid).numpy()
        neighbours, pairs = self.similarity[distances == 1], self.similarity[distances > 0]
        return {
            "neighbours": float(neighbours.mean()) if neighbours.size else None,
            "mean": float(pairs.mean()) if pairs.size else None,
            **span_of(pairs),
        }


def filters_of(model: Model) -> FilterSheet | None:
    """Return the filters of the patch embedding, of more than 64 the first 64 principal components; None without."""
    embedding = patch_filters(model)
    if embedding is None:
        return None
    filters = embedding.filters.cpu().double()
    features, shape = len(filters), tuple(filters.shape[1:])
    explained = None
    if features > LARGEST_SHEET and bool(filters.isfinite().all()):
        centred = (filters - filters.mean(dim=0)).flatten(1)
        _, sizes, components = torch.linalg.svd(centred, full_matrices=False)
        kept = min(LARGEST_SHEET, math.prod(shape))
        variance = sizes.square()
        explained = float(variance[:kept].sum() / variance.sum()) if float(variance.sum()) else 1.0
        filters = components[:kept].unflatten(1, shape)
    return FilterSheet(
        name=embedding.name,
        features=features,
        drawn=filters[:LARGEST_SHEET].float().numpy(),
        views=embedding.views,
        explained=explained,
    )


def similarities_of(model: Model) -> tuple[PositionSimilarity, ...]:
    """Return the similarities of each tensor of position embeddings."""
    return tuple(map(_similarity, position_embeddings(model)))


def _similarity(embeddings: PositionEmbeddings) -> PositionSimilarity:
    positions: Tensor = torch.nn.functional.normalize(embeddings.positions.cpu().double(), dim=-1)
    patches = positions[embeddings.prefix :]
    cosines = (positions @ patches.T).float().numpy()
    return PositionSimilarity(
        name=embeddings.name,
        grid=embeddings.grid,
        prefix=embeddings.prefix,
        stored=embeddings.stored,
        similarity=cosines[embeddings.prefix :],
        to_prefix=cosines[: embeddings.prefix],
    )
