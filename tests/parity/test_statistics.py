"""The numbers behind the verdicts, each compared with an independent computation, also of multi-label networks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from sklearn.neighbors import NearestNeighbors

from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.intervals import mcnemar, score_interval, share_interval
from gmmvit_deploy.neighbours import MIN_IMAGES, NEIGHBOURS, kept_neighbours
from gmmvit_deploy.parity._decisions import Crossings
from gmmvit_deploy.parity._multi_label import MultiLabelAccuracy
from gmmvit_deploy.parity._paired import Paired
from gmmvit_deploy.parity._single_label import Accuracy, Classes, classes_of
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.tolerances import Limit, Noise, limit_from_noise, signal_to_noise_db


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_distances_are_those_of_numpy(batch: int) -> None:
    generator = np.random.default_rng(0)
    expected = generator.standard_normal((200, 10))
    logits = expected + 1e-4 * generator.standard_normal(expected.shape)
    measure = ErrorMeasure()
    for start in range(0, len(expected), batch):
        measure.add(logits[start : start + batch], expected[start : start + batch])
    errors = measure.errors()
    apart = np.abs(logits - expected)
    assert errors.largest == apart.max()
    assert errors.rms == pytest.approx(np.sqrt((apart**2).mean()))
    assert errors.relative_l2 == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(expected))
    assert np.quantile(apart, 0.99) <= errors.p99 <= 1.03 * np.quantile(apart, 0.99, method="higher")
    cosines = (logits * expected).sum(1) / np.linalg.norm(logits, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.cosine == pytest.approx(cosines.min(), abs=1e-15)
    assert (errors.rows, errors.broken) == (200, 0)


@pytest.mark.parametrize("over_images", [False, True])
def test_the_db_is_that_of_all_images_at_once(over_images: bool) -> None:
    """A common offset of an image says nothing after softmax, nor that of a class after a sigmoid with a threshold."""
    generator = np.random.default_rng(8)
    reference = generator.normal(size=(50, 7))
    offset = generator.normal(scale=100, size=(1, 7) if over_images else (50, 1))
    logits = reference + generator.normal(scale=0.1, size=(50, 7))
    measure = ErrorMeasure()
    for rows in (slice(0, 20), slice(20, 50)):
        measure.add((logits + offset)[rows], (reference + offset)[rows])
    db = signal_to_noise_db(logits + offset, reference + offset, over_images=over_images)
    assert measure.db(over_images=over_images) == pytest.approx(db)
    assert db == pytest.approx(signal_to_noise_db(logits, reference, over_images=over_images))
    assert 18 < db < 21


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    measure = ErrorMeasure()
    measure.add(np.array([[1.0, np.nan], [1.0, 2.0]]), np.array([[1.0, 2.0], [1.0, 2.0]]))
    errors = measure.errors()
    assert (errors.rows, errors.broken, errors.largest, errors.p99) == (2, 1, 0.0, 0.0)
    nothing = ErrorMeasure().errors()
    assert math.isnan(nothing.largest)
    assert math.isnan(distance(np.zeros(3), np.zeros(4)))
    assert math.isnan(distance(np.array([np.inf]), np.zeros(1)))


@pytest.mark.first(1)
@pytest.mark.parametrize(("lost", "gained"), [(0.05, 0.01), (0.02, 0.02), (0.1, 0.1), (0.3, 0.05)])
def test_the_interval_covers_as_often_as_stated(lost: float, gained: float) -> None:
    """Sum exactly over every outcome of 60 images: each end of the interval covers with about 95 %."""
    images, below, above = 60, 0.0, 0.0
    for b in range(images + 1):
        for c in range(images - b + 1):
            ways = math.lgamma(images + 1) - math.lgamma(b + 1) - math.lgamma(c + 1) - math.lgamma(images - b - c + 1)
            chance = math.exp(
                ways + b * math.log(lost) + c * math.log(gained) + (images - b - c) * math.log(1 - lost - gained)
            )
            if chance > 1e-9:
                low, high = score_interval(images, b, c)
                below += chance * (low <= gained - lost)
                above += chance * (high >= gained - lost)
    assert 0.93 <= below <= 1
    assert 0.93 <= above <= 1


@pytest.mark.parametrize(("lost", "gained"), [(1, 0), (5, 0), (10, 3), (8, 8), (700, 800), (3000, 3000)])
def test_mcnemar(lost: int, gained: int) -> None:
    p = scipy.stats.binomtest(lost, lost + gained).pvalue
    assert mcnemar(lost, gained) == pytest.approx(p, rel=1e-6)
    assert mcnemar(lost, gained, tries=20) == pytest.approx(min(1, 20 * p), rel=1e-6)


@pytest.mark.parametrize(("right", "images"), [(0, 3), (2, 3), (71, 100), (9300, 10_000), (5, 5)])
def test_the_interval_of_an_accuracy(right: int, images: int) -> None:
    expected = scipy.stats.binomtest(right, images).proportion_ci(0.9, method="wilson")
    assert share_interval(right, images) == pytest.approx((expected.low, expected.high), abs=1e-12)


def pairs(*, both: int, lost: int = 0, gained: int = 0, neither: int = 0) -> Paired:
    return Paired(both=both, lost=lost, gained=gained, neither=neither)


def accuracy_of(numbers: Paired) -> Accuracy:
    """Return the accuracy of two classes, with half of the images in each."""
    collected = Accuracy(["one", "other"], Classes(to_logit=None, note=""))
    for count, trained, answered in (
        (numbers.both, True, True),
        (numbers.lost, True, False),
        (numbers.gained, False, True),
        (numbers.neither, False, False),
    ):
        labels = np.arange(count) % 2
        logits = {right: np.eye(2)[labels if right else 1 - labels] for right in (True, False)}
        collected.add(labels.tolist(), logits[trained], logits[answered])
    return collected


@pytest.mark.parametrize(
    ("numbers", "gate", "verdict"),
    [
        (pairs(both=10_000), 0.999, "passed"),
        (pairs(both=360), 0.999, "undecided"),
        (pairs(both=360), 0.99, "passed"),
        (pairs(both=9_900, lost=100), 0.999, "failed"),
        (pairs(both=9_980, lost=20), 0.999, "failed"),
        (pairs(both=9_990, lost=10), 0.999, "undecided"),  # on the point it would pass
        (pairs(both=10_000, lost=300, gained=300), 0.99, "passed"),
        (pairs(both=300, lost=40), 0.99, "failed"),
    ],
)
def test_gates_are_judged_on_the_interval(numbers: Paired, gate: float, verdict: str) -> None:
    check = accuracy_of(numbers).check(gate)
    assert check.verdict == verdict, check.summary
    assert check.details["top1"]["lost"] == numbers.lost
    assert check.details["top1"]["gained"] == numbers.gained
    assert (verdict == "undecided") == any("too few images to decide" in why for why in check.reasons)
    assert (verdict == "failed") == any("the loss of accuracy is too large" in why for why in check.reasons)


def test_top_5_and_classes() -> None:
    labels = [str(index) for index in range(7)]
    collected = Accuracy(labels, Classes(to_logit=None, note=""))
    logits = np.arange(7.0)[None].repeat(3, 0)  # the last class first
    collected.add([6, 2, 1], logits, np.full((3, 7), np.nan))
    details = collected.check(0.999).details
    assert details["top1"]["pytorch"] == pytest.approx(1 / 3)
    assert details["top5"]["pytorch"] == pytest.approx(2 / 3)
    assert details["top1"]["runner"] == details["top5"]["runner"] == 0  # what is not finite is wrong
    assert details["per_class"][0] == {"class": "1", "images": 1, "pytorch": 0, "runner": 0}


@pytest.mark.parametrize("place", [0, 4], ids=["top-1", "top-5"])
def test_statistics_judge_only_what_can_differ(place: int) -> None:
    """70 images are enough if the logits keep the limit, and each margin is larger than twice the largest distance."""
    trained = np.stack([np.roll([7.0, 6, 5, 4, 3, 2, 1], first) for first in range(70)])
    labels = [first % 7 for first in range(70)]
    labels[0] = place  # its true class has the largest logit, or the fifth
    for change, within_limit, verdict in (
        (0.499, True, "passed"),
        (0.5, True, "undecided"),
        (0.499, False, "undecided"),
    ):
        collected = Accuracy([str(index) for index in range(7)], Classes(to_logit=None, note=""))
        answered = trained.copy()
        answered[0, place + 1] += change  # at 0.5, two logits could change places
        collected.add(labels, trained, answered)
        check = collected.check(0.999, within_limit=within_limit)
        assert check.verdict == verdict, check.summary
        assert check.details["nearest_to_changing"] == pytest.approx(2 * change)
        assert check.details["by_margins"] == (verdict == "passed")
        assert any("too few images" in why for why in check.reasons) == (verdict == "undecided")


@pytest.mark.parametrize(("lost", "verdict"), [(0, "passed"), (9, "undecided"), (60, "failed")])
def test_the_gate_also_judges_top_5(lost: int, verdict: str) -> None:
    collected = Accuracy([str(index) for index in range(7)], Classes(to_logit=None, note=""))
    trained = np.arange(7.0)[None].repeat(1_000, 0)  # the last class first
    trained[:100, 5] = 7  # taken for class 5, with class 2 in the fifth place
    answered = trained.copy()
    answered[:lost, 2] = -1  # class 2 falls from the fifth place to the last
    collected.add([2] * 100 + [6] * 900, trained, answered)
    check = collected.check(0.99)
    assert check.details["top1"]["lost"] == 0
    assert check.verdict == verdict, check.summary
    assert [reason.partition(":")[0] for reason in check.reasons] == ([] if verdict == "passed" else ["top-5"])


def test_classes_that_look_the_same_are_shown_apart() -> None:
    assert classes_of(("th\u00e9", "caf\u00e9"), ("cafe\u0301", "the\u0301"), "data").to_logit == (1, 0)
    with pytest.raises(InputError, match=r"such as polar bear; .* such as polar\xa0bear \('polar\\xa0bear'\)"):
        classes_of(("polar\xa0bear",), ("polar bear",), "data")


def test_a_repeated_label_is_matched_by_label_and_index() -> None:
    labels = ("crane", "hen", "crane")
    assert classes_of(labels, labels, "data") == Classes(to_logit=None, note="")
    assert classes_of(("crane (2)", "crane (0)", "hen"), labels, "data").to_logit == (2, 0, 1)
    assert classes_of(("crane (2)", "hen"), labels, "data").to_logit == (2, 1)
    with pytest.raises(InputError, match="has 2 classes with the label crane") as caught:
        classes_of(("crane", "hen"), labels, "data")
    assert "'crane (0)', 'crane (2)'" in caught.value.hint


def test_limits_follow_from_the_noise() -> None:
    noise = Noise(largest=1e-6, rms=2e-7, scale=4.0)
    exact = limit_from_noise(noise)
    assert exact.largest == pytest.approx(8e-6 + 4 * 2**-23)
    assert "8 × 1e-06 (float32 noise)" in exact.derivation
    half, brain = limit_from_noise(noise, "fp16"), limit_from_noise(noise, "bf16")
    assert half.largest == pytest.approx(2 * 2**13 * 1e-6)
    assert brain.largest == pytest.approx(8 * half.largest)
    assert limit_from_noise(noise, "int8", recorded=0.1).largest == pytest.approx(0.4)
    with pytest.raises(ValueError, match="recorded distance"):
        limit_from_noise(noise, "fp8")
    assert noise.usable
    assert not Noise(largest=0.1, rms=0.1, scale=4.0).usable


# ---- multi-label networks, on logits written out by hand -------------------------------------------------------------


LABELS = LabelSet(labels=("a", "b"), task="multi-label", thresholds=(0.5, 0.5))
SAME = Classes(to_logit=None, note="")
LIMIT = Limit(largest=0.01, rms=None, derivation="by hand")


def test_a_crossing_near_the_threshold_is_noise_and_another_is_wrong() -> None:
    exact = np.array([[0.004, 3.0], [0.5, -2.0], [1.0, -1.0]])
    logits = exact + np.array([[-0.006, 0.0], [-0.6, 0.0], [0.001, 0.0]])
    crossings = Crossings(LABELS)
    crossings.add(["x", "y", "z"], logits, exact, exact)
    check = crossings.check(LIMIT)
    assert check.verdict == "failed"
    near, far = check.details["flips"]
    assert (near["where"], near["pytorch_class"], near["runner_class"]) == ("x", "a", "not a")
    assert (near["within_noise"], far["within_noise"]) == (True, False)
    assert near["margin"] == pytest.approx(0.004)
    assert "y: PyTorch: a, the runner: not a; the logit is 0.5 from the threshold" in check.reasons[0]
    assert check.details["agreement"] == pytest.approx(1 / 3)


def test_a_runner_that_loses_a_label_fails() -> None:
    trained = np.where(np.arange(801)[:, None] % [2, 3] == 0, 2.0, -2.0)
    labels = [tuple(map(int, np.flatnonzero(row > 0))) for row in trained[:-1]]
    lost = np.where([False, True], np.nan, trained)
    collected = MultiLabelAccuracy(LABELS, SAME)
    collected.add([*labels, None], trained, lost)
    check = collected.check(0.99)
    assert check.verdict == "failed"
    assert all(any(name in reason for reason in check.reasons) for name in ("macro F1", "mAP"))


def test_data_of_the_other_task_is_refused() -> None:
    logits = np.zeros((1, 2))
    with pytest.raises(InputError, match="a single class for each image, and the bundle is multi-label"):
        MultiLabelAccuracy(LABELS, SAME).add([1], logits, logits)
    with pytest.raises(InputError, match="a set of labels for each image, and the bundle is single-label"):
        Accuracy(["a", "b"], SAME).add([(0, 1)], logits, logits)


class TestData:
    def test_an_array_of_0_and_1(self) -> None:
        pixels = np.zeros((2, 4, 4), np.uint8)
        images = ArrayImages("x", pixels, np.array([[1, 0, 1], [0, 0, 0]]))
        assert [images.label(0), images.label(1)] == [(0, 2), ()]
        assert ArrayImages("x", pixels, np.array([[2], [1]])).label(0) == 2
        with pytest.raises(InputError, match=r"expected labels \(N, classes\) of 0 and 1"):
            ArrayImages("x", pixels, np.array([[1, 2], [0, 0]]))

    def test_a_table(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("file, a, b\nx.png,1,0\nsub/y.png,1,1\n")
        images = open_data(f"table:{tmp_path / 't.csv'}")
        assert (images.classes, len(images)) == (("a", "b"), 2)
        assert [images.label(0), images.label(1)] == [(0,), (0, 1)]
        assert images.where(1) == str(tmp_path / "sub" / "y.png")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("path,a\nx.png,1\n", "expected a first line with file and the labels"),
            ("file,a\nx.png,2\n", "line 2: expected a path and 1 values of 0 or 1, got x.png,2"),
            ("file,a\n", "expected at least one image file"),
        ],
    )
    def test_tables_with_mistakes(self, content: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text(content)
        with pytest.raises(InputError, match=message):
            open_data(f"table:{tmp_path / 't.csv'}")


# ---- the nearest neighbours that features keep, against scikit-learn's search ----------------------------------------


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
