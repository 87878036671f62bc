"""The share of nearest neighbours that features keep, against scikit-learn's search."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.neighbours import MIN_IMAGES, NEIGHBOURS, kept_neighbours

COUNT = 1500  # more than a part of the computation
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.standard_normal((COUNT, 16)).astype(np.float32)


def searched(features: np.ndarray) -> np.ndarray:
    search = NearestNeighbors(n_neighbors=NEIGHBOURS + 1, metric="cosine").fit(features)
    return search.kneighbors(features, return_distance=False)[:, 1:]


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_the_share_is_that_of_a_search_with_scikit_learn(noise: float) -> None:
    program = FEATURES + noise * RANDOM.standard_normal(FEATURES.shape).astype(np.float32)
    kept = [len({*ours} & {*theirs}) for ours, theirs in zip(searched(program), searched(FEATURES), strict=True)]
    share = kept_neighbours(program, FEATURES)
    assert share.value == pytest.approx(np.mean(kept) / NEIGHBOURS, abs=1e-9)
    assert share.low < share.value <= share.high <= 1


def test_other_features_keep_only_what_chance_gives() -> None:
    share = kept_neighbours(FEATURES[RANDOM.permutation(COUNT)], FEATURES)
    assert share.value == pytest.approx(NEIGHBOURS / (COUNT - 1), abs=0.005)


def test_the_length_of_features_does_not_count() -> None:
    lengths = RANDOM.uniform(0.1, 10, (COUNT, 1)).astype(np.float32)
    assert kept_neighbours(lengths * FEATURES, FEATURES).value == pytest.approx(1, abs=1e-3)


def test_images_that_are_equally_near_may_change_places() -> None:
    copies = FEATURES[:60].repeat(20, axis=0)
    order = RANDOM.permutation(len(copies))
    noise = 1e-7 * RANDOM.standard_normal(copies.shape).astype(np.float32)
    assert kept_neighbours((copies + noise)[order], copies[order]).value == 1


def test_features_that_are_not_finite_keep_no_neighbour() -> None:
    broken = FEATURES[:400].copy()
    broken[:100] = np.nan
    assert kept_neighbours(broken, FEATURES[:400]).value <= 0.75


def test_images_that_can_decide_nothing_judge_nothing() -> None:
    few, near = FEATURES[: MIN_IMAGES - 1], 1 + 1e-4 * FEATURES
    with pytest.raises(ValueError, match="too few images to decide: 99, expected at least 100"):
        kept_neighbours(few, few)
    with pytest.raises(ValueError, match="hold most of these images equally near: any features keep 100%"):
        kept_neighbours(near, near)
    for features, reference in ((few, few), (near, near), (np.full_like(FEATURES, np.nan), FEATURES)):
        assert not Gate(keep_neighbours=0.9).row_of_features(features, reference)["holds"]
