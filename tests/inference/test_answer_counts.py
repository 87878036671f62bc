"""Counts of answers by how sure they are, and by class."""

from __future__ import annotations

import numpy as np

from gmmvit_deploy.inference.answer_counts import SURENESS, count_answers, sureness
from gmmvit_deploy.inference.labels import LabelSet


def test_a_single_label_image_counts_once_in_each_kind() -> None:
    logits = np.log([[0.97, 0.03], [0.3, 0.7], [0.5, 0.5]]).astype(np.float32)
    broken = np.array([[np.nan, 0.0]], np.float32)
    counts = count_answers(np.concatenate([logits, broken]), LabelSet(labels=("hen", "hen")))
    assert counts == {
        **{("probability", bucket): 1 for bucket in ("0.95-0.99", "0.6-0.8", "0.4-0.6")},
        ("margin", "3-4"): 1,
        ("margin", "0.5-1"): 1,
        ("margin", "0-0.5"): 1,
        ("class", "hen (0)"): 2,
        ("class", "hen (1)"): 1,
    }
    assert {kind: sum(buckets.values()) for kind, buckets in sureness(counts).items()} == {
        "probability": 3,
        "margin": 3,
    }
    assert [(kind, bucket) for kind, buckets in sureness(counts).items() for bucket in buckets] == list(SURENESS)


def test_a_multi_label_image_counts_in_each_class_that_is_present() -> None:
    labels = LabelSet(labels=("sea", "boat"), task="multi-label", thresholds=(0.5, 0.9))
    counts = count_answers(np.array([[5.0, 2.5], [-9.0, -7.0]], np.float32), labels)
    assert counts == {
        ("probability", "0.99-1"): 1,
        ("probability", "0-0.2"): 1,
        ("margin", "0-0.5"): 1,  # 2.5 beside log(0.9 / 0.1) = 2.197
        ("margin", "8-12"): 1,  # min(9, 9.197)
        ("class", "sea"): 1,
        ("class", "boat"): 1,
    }


def test_a_single_class_has_no_margin_and_no_images_no_record() -> None:
    one = LabelSet(labels=("cat",))
    assert count_answers(np.array([[3.0]], np.float32), one) == {("probability", "0.99-1"): 1, ("class", "cat"): 1}
    assert sureness(count_answers(np.zeros((0, 1), np.float32), one)) == {}
