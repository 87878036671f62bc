"""The threshold of a cascade keeps its target on other images, and says what its images prove."""

from __future__ import annotations

import numpy as np
import pytest

from gmmvit_deploy.bundle.cascades import chosen_threshold, same_margins
from gmmvit_deploy.inference.cascade import Cascade, decision_margins


def drawn(count: int, seed: int = 0, classes: int = 10, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Return float32's logits, and those of a program that adds noise."""
    random = np.random.default_rng(seed)
    exact = random.normal(0, 2, (count, classes))
    return exact, exact + random.normal(0, noise, exact.shape)


def margins_of(exact: np.ndarray, fast: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    margins = decision_margins(fast)
    return margins, margins - same_margins(fast, exact, None)


@pytest.mark.parametrize("count", [100, 300, 3000])
def test_the_target_holds_on_other_images(count: int) -> None:
    exact, fast = drawn(20_000, seed=99)
    margins, losses = margins_of(exact, fast)
    assert (losses > margins).mean() > 0.05  # the fast program alone is far from the target
    kept, deferred = [], []
    for seed in range(20):
        threshold = chosen_threshold(*margins_of(*drawn(count, seed)), 0.99)
        kept.append(1 - ((losses > margins) & (margins >= threshold)).mean())
        deferred.append((margins < threshold).mean())
    assert np.mean(np.array(kept) >= 0.99) >= 0.9, kept
    assert np.mean(deferred) < 0.6


def test_a_program_that_never_errs_defers_nothing_and_more_is_asked_of_few_images() -> None:
    exact, fast = drawn(3000)
    assert chosen_threshold(*margins_of(exact, exact), 0.99) == 0
    margins, losses = margins_of(exact, fast)
    thresholds = [chosen_threshold(margins, losses, target) for target in (0.9, 0.99, 0.998)]
    assert thresholds == sorted(thresholds)
    assert chosen_threshold(margins[:60], losses[:60], 0.998) > margins[:60][losses[:60] > margins[:60]].max()


def test_decisions_of_several_labels_have_the_margin_of_the_nearest() -> None:
    limits = np.array([0.0, 1.0])
    logits, exact = np.array([[2.0, 1.25], [-0.5, 3.0]]), np.array([[2.0, 0.75], [-0.25, 3.0]])
    np.testing.assert_allclose(decision_margins(logits, limits), [0.25, 0.5])
    np.testing.assert_allclose(same_margins(logits, exact, limits), [-0.25, 0.25])


def test_the_images_of_a_batch_that_are_computed_again_run_as_one_batch_and_leave_the_others_alone() -> None:
    sizes = []

    def second(batch: np.ndarray) -> list[np.ndarray]:
        sizes.append(len(batch))
        return [batch + 100, batch * 2]

    logits = np.array([[0.0, 5.0], [1.0, 1.1], [np.nan, 1.0], [np.inf, 2.95]], np.float32)
    cascade = Cascade(lambda batch: [batch, batch * 3], second, 0.5)
    answers, features, deferred = cascade.answers(logits)
    assert deferred[:, 0].tolist() == [False, True, True, True]
    assert sizes == [3]
    np.testing.assert_array_equal(answers, np.where(deferred, logits + 100, logits))
    np.testing.assert_array_equal(features, np.where(deferred, logits * 2, logits * 3))
    assert cascade.answers(logits[:1])[2].tolist() == [[False]]
    assert sizes == [3]
