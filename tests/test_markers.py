"""What `make test-fast` and `make test` leave out is marked, and what is not marked cannot export."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from gmmvit_deploy.families import FAMILIES
from gmmvit_deploy.precision import PRECISIONS
from tests.conftest import LATER, MANIFEST, mark_by_fixtures
from tests.families.small_models import SMALL
from tests.families.test_planted_mistakes import PLANTED
from tests.matrix import MATRIX, kinds_of, mark_matrix, representatives

ROOT = Path(__file__).parents[1]
MAKEFILE = ROOT / "Makefile"


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
    markers = ("server", "engine", "export", "process", "browser", "matrix")
    left_out = {marker for marker in markers if marker in recipe.partition(" -m ")[2]}
    assert left_out == set(markers)


def test_make_test_leaves_out_further_cases_and_make_test_all_nothing() -> None:
    recipes = dict(re.findall(r"^(test|test-all):.*\n\t(.*)$", MAKEFILE.read_text(), re.MULTILINE))
    assert recipes == {"test": '$(PYTEST) -m "not matrix"', "test-all": "$(PYTEST)"}


def test_every_test_of_the_matrix_exists() -> None:
    for name in MATRIX:
        path, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / path).read_text(), name


def test_the_page_names_every_test_that_has_the_marker_in_its_source() -> None:
    page = (ROOT / "docs" / "pages" / "developing.md").read_text()
    marked = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(
            r"^@.*pytest\.mark\.matrix\b.*\n(?:@.*\n)*def (test_\w+)", path.read_text(), re.MULTILINE
        )
    }
    assert len(marked) == 11
    assert {name for name in marked if f"`{name}`" not in page} == set()


def test_representatives_have_every_family_mask_and_precision() -> None:
    cases = [{"name": name, "precision": precision} for name in LATER for precision in PRECISIONS]
    chosen = [cases[index] for index in representatives(cases)]
    assert {MANIFEST[case["name"]]["family"] for case in chosen} == {MANIFEST[name]["family"] for name in LATER}
    assert {MANIFEST[case["name"]]["mask"] for case in chosen} == {MANIFEST[name]["mask"] for name in LATER}
    assert {case["precision"] for case in chosen} == set(PRECISIONS)
    assert len(chosen) < len(LATER)
    taken = Counter(case["precision"] for case in chosen)
    assert max(taken.values()) - min(taken.values()) <= 1


def test_kinds_of_small_models_and_mistakes() -> None:
    assert {kind for small in SMALL for kind in kinds_of(small)} >= {
        *(("family", family.name) for family in FAMILIES),
        *(("mask", mask) for family in FAMILIES for mask in (*family.mask_kinds, *family.variants())),
    }
    assert {kind for planted in PLANTED for kind in kinds_of(planted)} == {
        ("family", planted.family) for planted in PLANTED
    }


@dataclass
class Case:
    """The parts of a `pytest.Item` that `mark_matrix` reads."""

    nodeid: str
    params: dict[str, str]
    own: tuple[pytest.Mark, ...] = ()
    added: list[str] = field(default_factory=list)

    @property
    def callspec(self) -> Case:
        return self

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.own if mark.name == name]

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.added.append(mark.name)


def test_further_cases_are_marked_and_skipped_cases_represent_nothing() -> None:
    skipped, other = (pytest.mark.skipif(absent, reason="no kernel").mark for absent in (True, False))
    golden = "tests/families/test_golden_runtimes.py::test_onnxruntime"
    cases = [
        Case(f"{golden}[deepvit_patch]", {"name": "deepvit_patch"}, (skipped,)),
        Case(f"{golden}[deepvit_cnn_scaled]", {"name": "deepvit_cnn_scaled"}, (other,)),
        Case(f"{golden}[deepvit_ema_amp]", {"name": "deepvit_ema_amp"}),
        Case("tests/test_docs.py::test_every_block_runs[vp_vit]", {"name": "vp_vit"}),
    ]
    mark_matrix(cases)
    assert [case.added for case in cases] == [[], [], ["matrix"], []]
