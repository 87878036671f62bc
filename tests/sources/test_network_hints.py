"""The options for properties of a network that no tensor shows."""

from __future__ import annotations

from typing import Any

import pytest

from gmmvit_cli.models import stages_from
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.sources.hints import LoadHints


@pytest.mark.parametrize(("text", "stages"), [(None, None), ("none", ()), ("1", (1,)), ("1,2,3", (1, 2, 3))])
def test_stages_are_parsed(text: str | None, stages: tuple[int, ...] | None) -> None:
    assert stages_from(text) == stages
    assert LoadHints(decomposed_stages=stages).decomposed_stages == stages


@pytest.mark.parametrize("text", ["", "1;2", "first", "1,,2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--decomposed-stages: expected numbers separated by commas, or none"):
        stages_from(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decomposed_stages": (0, 1)}, "--decomposed-stages: expected different numbers of at least 1, got 0,1"),
        ({"decomposed_stages": (1, 1)}, "--decomposed-stages: expected different numbers of at least 1, got 1,1"),
        ({"scale_adjustment": 0.0}, "--scale-adjustment: expected a number above 0, got 0"),
        ({"scale_adjustment": float("nan")}, "--scale-adjustment: expected a number above 0, got nan"),
        ({"pool": "max"}, "--pool: expected cls or mean or pooler, got 'max'"),
        ({"source": "keras"}, "--source: expected spt-lsa or vit-pytorch, got 'keras'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadHints(**values)
