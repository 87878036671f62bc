from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_cli.options import labels_from, thresholds_from
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions
from gmmvit_deploy.images.names import names_from_text
from gmmvit_deploy.inference.answer_counts import SURENESS, count_answers, sureness
from gmmvit_deploy.inference.labels import LabelSet, distinct_names


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


class TestLabelFiles:
    @pytest.mark.parametrize(
        "content",
        [
            "cat\ndog\nbird\n",
            "\ufeffcat\r\n\r\ndog\r\n bird \r\n",
            '["cat",\n"dog",\n"bird"]',
            '{"0": "cat", "2": "bird", "1": "dog"}',
            '{"dog": 1, "cat": 0, "bird": 2}',
            '{"model_type": "vit", "id2label": {"0": "cat", "1": "dog", "2": "bird"}}',
            "0 cat\n1 dog\n2 bird",
            "id;name\n0;cat\n1;dog\n2;bird",
            '"name","id"\n"cat",0\n"dog",1\n"bird",2',
            "\u200b0\u00a0c\u200bat\n1\u00a0\u200edog\u200f\n2\u00a0bi\ufeffrd\u2060",
        ],
    )
    def test_the_formats(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "labels").write_bytes(content.encode())
        assert labels_from(str(tmp_path / "labels")) == ("cat", "dog", "bird")

    @pytest.mark.parametrize(
        "names",
        [
            ("0", "1", "2"),
            ("0 stars", "1 star", "2 stars"),
            ("3-toed sloth", "2-toed sloth"),
            ("tench, Tinca tinca", "goldfish, Carassius auratus"),
            ("cat [indoor]", "dog [indoor]"),
            ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f469\u200d\U0001f33e"),
        ],
    )
    def test_names_with_numbers_and_marks_stay_whole(self, names: tuple[str, ...], tmp_path: Path) -> None:
        (tmp_path / "labels.txt").write_text("\n".join(names), encoding="utf-8")
        assert labels_from(str(tmp_path / "labels.txt")) == names

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"1 cat\n2 dog", "expected the indices 0 to 1, each once, beside the names, got 1, 2"),
            (b"0,cat,animal\n1,dog,animal", "got further columns: 0,cat,animal"),
            (b"cat,0\ndog,0", "expected the indices 0 to 1, each once, beside the names, got 0, 0"),
            (b'{"0": "cat", "0": "dog"}', "the same key twice"),
            (b'[{"id": 0, "name": "cat"}]', 'got {"id": 0, "name": "cat"} for a name'),
            (b'"cat",\n"dog",', "lines with the marks of a list"),
            (b"caf\xe9\nth\xe9", "the file is not UTF-8 text"),
            (b"cat\x00\ndog", "a control character"),
        ],
    )
    def test_what_is_no_list_of_names_is_refused(self, content: bytes, message: str, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            labels_from(str(tmp_path / "labels.txt"))
        assert "labels.txt" in str(caught.value)

    def test_labels_on_the_command_line(self) -> None:
        assert labels_from("cat, cafe\u0301") == ("cat", "caf\u00e9")
        assert labels_from("0 cat,1 dog") == labels_from('["cat", "dog"]') == ("cat", "dog")
        many = tuple(f"label number {index} of many" for index in range(1000))
        assert labels_from(",".join(many)) == many
        with pytest.raises(InputError, match="--labels: expected names in UTF-8"):
            labels_from(os.fsdecode(b"caf\xe9,th\xe9"))


class TestThresholdFiles:
    def test_a_label_in_another_form_of_unicode(self, tmp_path: Path) -> None:
        (tmp_path / "t.json").write_text('{"cafe\u0301": 0.4, "th\u00e9": 0.6}', encoding="utf-8")
        options = ExportOptions(task="multi-label", thresholds=thresholds_from(str(tmp_path / "t.json")))
        assert options.fitting_thresholds(("caf\u00e9", "the\u0301")) == (0.4, 0.6)

    def test_two_thresholds_for_a_label_in_two_forms_of_unicode(self) -> None:
        options = ExportOptions(task="multi-label", thresholds={"cafe\u0301": 0.4, "caf\u00e9": 0.6})
        with pytest.raises(InputError, match="expected one threshold for caf\u00e9, got 2"):
            options.fitting_thresholds(("caf\u00e9", "tea"))

    def test_the_formats(self, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text("0.5\n0.6\n")
        (tmp_path / "list.json").write_text("[0.5, 0.6]")
        (tmp_path / "named.json").write_text('{"b (1)": 0.6, "b (0)": 0.5}')
        for name in ("t.txt", "list.json", "named.json"):
            options = ExportOptions(task="multi-label", thresholds=thresholds_from(str(tmp_path / name)))
            assert options.fitting_thresholds(("b", "b")) == (0.5, 0.6)
        assert thresholds_from("0.4") == 0.4

    @pytest.mark.parametrize(
        ("content", "labels", "message"),
        [
            ('{"a": 0.5}', ("a", "b"), "expected 2 thresholds, one for each label, got 1: b is missing"),
            ('{"a": 0.5, "b": 0.5, "c": 0.5}', ("a", "b"), "got 3: there is no label c"),
            ('{"a": "half"}', ("a",), "expected a number on each line"),
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


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, '{"0": "cat", "' + "9" * 5000 + '": "dog"}'])
def test_json_beyond_the_limits_of_python_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected JSON with a list of names"):
        names_from_text(text, "names.json")


# ---- answers by how sure they are, and by class ----------------------------------------------------------------------


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
