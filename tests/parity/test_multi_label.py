"""Decisions and accuracy of multi-label networks, on logits written out by hand, and the tables of such data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.parity._decisions import Crossings
from gmmvit_deploy.parity._multi_label import MultiLabelAccuracy
from gmmvit_deploy.parity._single_label import Accuracy, Classes
from gmmvit_deploy.tolerances import Limit

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
