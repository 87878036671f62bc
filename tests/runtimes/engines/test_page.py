"""The report of an engine: a page with the verdict in a sentence, the reasons against the engine, and its card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.engines.card import Engine
from gmmvit_deploy.runtimes.engines.layers import Miss
from gmmvit_deploy.runtimes.engines.page import page_of, write_page
from tests.browser import accessibility_problems
from tests.pages import Element, require_readable_page


def verdict_and_changes(engine: Engine, **changes: Any) -> tuple[Element, list[str]]:
    tree = require_readable_page(page_of(replace(engine, card=replace(engine.card, **changes))))
    verdict, below = tree.all("main")[0].children[:2]
    return verdict, [line.text for line in below.all("li")]


def test_the_page_shows_the_whole_card(engine: Engine, tmp_path: Path) -> None:
    write_page(engine, tmp_path / "engine.html")
    tree = require_readable_page((tmp_path / "engine.html").read_text())
    text, card = tree.text, engine.card
    count = len(card.attentions)
    assert (
        f"Every matrix product runs in the type that fp16 promises, and all {count} attentions are a single kernel"
        in text
    )
    for proof in card.attentions:
        assert proof.name in text
        assert proof.kernels[0] in text
    for digest in card.sha256.values():
        assert digest in text
    assert card.mask_cost is not None
    assert f"{card.mask_cost.bytes:,}" in text
    assert card.trtexec in text
    assert page_of(engine) == (tmp_path / "engine.html").read_text()
    with pytest.raises(InputError, match=r"expected a path that ends in \.html"):
        write_page(engine, tmp_path / "engine.txt")


@pytest.mark.parametrize(
    ("change", "outcome", "line"),
    [
        (
            {"misses": (Miss(node="head", target="8.9", profile=0, expected="fp16", actual="fp32"),)},
            "failed",
            "1 matrix product in fp32, expected fp16: head",
        ),
        ({"unfolded": ("a mask",)}, "failed", "Not folded: a mask"),
        ({"unjudged": "no roles"}, "undecided", "The types of the matrix products were not judged: no roles"),
        ({"attentions": ()}, "undecided", "The graph has no attention, so fusion could not be checked"),
    ],
)
def test_what_stands_against_an_engine(change: dict[str, Any], outcome: str, line: str, engine: Engine) -> None:
    verdict, changes = verdict_and_changes(engine, **change)
    assert verdict.attributes["class"] == f"verdict {outcome}"
    assert changes[0] == line


@pytest.mark.nightly
@pytest.mark.integration
def test_an_accessibility_checker_has_no_complaint(engine: Engine, tmp_path: Path) -> None:
    write_page(engine, tmp_path / "engine.html")
    assert accessibility_problems(tmp_path / "engine.html") == []
