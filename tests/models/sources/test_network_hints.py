"""The options for properties of a network that no tensor shows."""

from __future__ import annotations

from typing import Any

import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.sources.hints import LoadHints, settings_from


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("heads=4", 4),
        ("decomposed_stages=none", ()),
        ("decomposed_stages=1,2,3", (1, 2, 3)),
        ("scale_adjustment=0.5", 0.5),
        ("transform_scale=no", False),
        ("pool=cls", "cls"),
    ],
)
def test_a_setting_is_read(text: str, value: object) -> None:
    name = text.partition("=")[0]
    hints = LoadHints(**settings_from([text]))
    assert getattr(hints, name) == value
    assert hints.typed()[name] == f"--set {text}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads", "--set heads: expected NAME=VALUE"),
        ("heads=four", "--set heads: expected a whole number, got 'four'"),
        ("decomposed_stages=1,,2", "--set decomposed_stages: expected numbers separated by commas, or none"),
        ("transform_scale=1", "--set transform_scale: expected yes or no, got '1'"),
        ("haeds=4", "--set haeds=4: expected NAME=VALUE with one of the names heads, closed_form"),
    ],
)
def test_another_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings_from([text])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decomposed_stages": (0, 1)}, "--set decomposed_stages: expected different numbers of at least 1, got 0,1"),
        ({"decomposed_stages": (1, 1)}, "--set decomposed_stages: expected different numbers of at least 1, got 1,1"),
        ({"scale_adjustment": 0.0}, "--set scale_adjustment: expected a number above 0, got 0"),
        ({"scale_adjustment": float("nan")}, "--set scale_adjustment: expected a number above 0, got nan"),
        ({"pool": "max"}, "--set pool: expected cls or mean or pooler, got 'max'"),
        ({"source": "keras"}, "--set source: expected spt-lsa or vit-pytorch, got 'keras'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadHints(**values)
