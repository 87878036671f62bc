from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_cli.options import thresholds_from
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions
from gmmvit_deploy.images.labels import LabelSet, distinct_names


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("cat", "dog"), ("cat", "dog")),
        (("crane", "hen", "crane"), ("crane (0)", "hen", "crane (2)")),
        (("crane", "crane (0)", "crane"), ("crane (0)", "crane (0) (1)", "crane (2)")),
        ((), ()),
    ],
    ids=["unique", "repeated", "a label that looks like a name", "no labels"],
)
def test_every_class_has_a_name_of_its_own(labels: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert distinct_names(labels) == names


LOGITS = np.array([2.0, -1.0, 0.5, -800.0], np.float32)


def test_a_single_label_is_the_likeliest_class() -> None:
    label_set = LabelSet(labels=("a", "b", "a", "c"))
    first, second = label_set.predictions(LOGITS, 2)
    assert (first.index, second.index) == (0, 2)
    assert first.to_json().keys() == {"label", "index", "probability"}
    assert label_set.decided((first, second)) == ("a (0)",)
    assert label_set.probabilities(LOGITS).sum() == pytest.approx(1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_have_no_rank(value: float) -> None:
    with pytest.raises(ValueError, match="logits that are not finite"):
        LabelSet(labels=("a", "b")).predictions(np.array([value, 1.0]), 1)


def test_a_batch_has_a_rank_for_every_present_label() -> None:
    label_set = LabelSet(labels=("a", "b", "c", "d"), task="multi-label", thresholds=(0.9, 0.25, 0.6, 0.5))
    ranked = label_set.ranked(np.stack([LOGITS, -np.full(4, 9.0)]), 1)
    assert ranked.present.tolist() == [[False, True, True], [False, False, False]]
    assert ranked.indices[0].tolist() == [0, 2, 1]
    assert label_set.ranked(-np.full((2, 4), 9.0), 1).indices.shape == (2, 1)


def test_multi_label_lists_every_label_that_reaches_its_threshold() -> None:
    label_set = LabelSet(labels=("a", "b", "c", "d"), task="multi-label", thresholds=(0.9, 0.25, 0.6, 0.5))
    guesses = label_set.predictions(LOGITS, 1)
    assert [(guess.label, guess.present) for guess in guesses] == [("a", False), ("c", True), ("b", True)]
    assert label_set.decided(guesses) == ("b", "c")
    assert guesses[0].probability == pytest.approx(1 / (1 + np.exp(-2)))
    assert guesses[0].to_json()["threshold"] == 0.9
    assert label_set.probabilities(LOGITS)[3] == 0
    assert 1 / (1 + np.exp(-np.array(label_set.threshold_logits))) == pytest.approx(label_set.thresholds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thresholds": (0.5, 0.5)}, "expected 0 numbers, got 2"),
        ({"task": "multi-label", "thresholds": (0.5,)}, "expected 2 numbers, got 1"),
        ({"task": "multi-label", "thresholds": (0.5, 1.0)}, "above 0 and below 1, got 1.0"),
        ({"task": "multi-label", "thresholds": (0.5, "x")}, "above 0 and below 1, got 'x'"),
        ({"task": "several"}, "expected one of single-label, multi-label, got 'several'"),
    ],
    ids=str,
)
def test_a_label_set_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabelSet(labels=("a", "b"), **changes)


class TestThresholdFiles:
    def test_the_formats(self, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text("0.5\n0.6\n")
        (tmp_path / "list.json").write_text("[0.5, 0.6]")
        (tmp_path / "named.json").write_text('{"b (1)": 0.6, "b (0)": 0.5}')
        for name in ("t.txt", "list.json", "named.json"):
            options = ExportOptions(task="multi-label", thresholds=thresholds_from(str(tmp_path / name)))
            assert options.fitting_thresholds(("b", "b")) == (0.5, 0.6)
        assert thresholds_from("0.4") == 0.4
        assert thresholds_from(None) is None

    @pytest.mark.parametrize(
        ("content", "labels", "message"),
        [
            ('{"a": 0.5}', ("a", "b"), "expected 2 thresholds, one for each label, got 1: 'b' is missing"),
            ('{"a": 0.5, "b": 0.5, "c": 0.5}', ("a", "b"), "got 3: there is no label 'c'"),
            ('{"a": "half"}', ("a",), "expected a number on each line"),
            ('"a"', ("a",), "expected a number on each line"),
            ("[null]", ("a",), "expected a number on each line"),
            ("{", ("a",), "expected a number on each line"),
        ],
    )
    def test_mistakes(self, content: str, labels: tuple[str, ...], message: str, tmp_path: Path) -> None:
        (tmp_path / "t.json").write_text(content)
        file = str(tmp_path / "t.json")

        def read() -> object:
            options = ExportOptions(task="multi-label", thresholds=thresholds_from(file), thresholds_source=file)
            return options.fitting_thresholds(labels)

        with pytest.raises(InputError, match=message) as caught:
            read()
        assert "t.json" in str(caught.value)

    def test_a_missing_file(self) -> None:
        with pytest.raises(InputError, match="nowhere: expected a number on each line"):
            thresholds_from("nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "multi-label"}, "--task multi needs the probability"),
        ({"thresholds": 0.5}, "--thresholds belongs to a multi-label network"),
        ({"task": "multi-label", "thresholds": 0.5, "outputs": ("features",)}, "--outputs features writes no logits"),
    ],
    ids=["no thresholds", "no task", "no logits"],
)
def test_options_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportOptions(**changes)
