"""What `make test-fast` leaves out is marked, and what is not marked cannot export."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import mark_by_fixtures

MAKEFILE = Path(__file__).parents[1] / "Makefile"


def test_a_test_without_the_marker_cannot_export() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"exports a model: mark it with pytest\.mark\.export"):
        torch.onnx.export(torch.nn.Identity(), (torch.zeros(1),))


def test_a_test_is_marked_by_the_fixtures_it_uses(
    request: pytest.FixtureRequest, gmmvit: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert request.node.get_closest_marker("process") is not None
    assert request.node.get_closest_marker("export") is None


@pytest.mark.parametrize(
    ("fixtures", "markers"),
    [
        ({"tmp_path"}, set()),
        ({"server", "bundle", "shared"}, {"server", "export"}),
        ({"engine", "precise_bundle", "bundle", "rtx"}, {"engine", "export"}),
        ({"tensor_bundles"}, {"export"}),
    ],
)
def test_markers_of_fixtures(fixtures: set[str], markers: set[str]) -> None:
    assert mark_by_fixtures(fixtures) == markers


def test_make_test_fast_leaves_all_of_them_out() -> None:
    recipe = MAKEFILE.read_text().partition("\ntest-fast:")[2].partition("\n\n")[0]
    markers = ("server", "engine", "export", "process", "browser")
    left_out = {marker for marker in markers if marker in recipe.partition(" -m ")[2]}
    assert left_out == set(markers)
