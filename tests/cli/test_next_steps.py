"""Export asks for the resize rule of checkpoints that do not state it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.images.resize_rules import RESIZE_RULES
from gmmvit_deploy.models.families import FAMILIES
from tests.cli.terminal import gmmvit_here, refused
from tests.conftest import golden

RMT = ("--image-size", "64", "--set", "decomposed_stages=1,2,3")


def wrong(*arguments: str | Path) -> tuple[str, str]:
    """Return (message, hint) of a command that ends with an error."""
    return refused(gmmvit_here(*arguments, columns=1000))


@pytest.mark.parametrize(
    ("name", "options"),
    [("rmt_2023", RMT), ("vp_vit", ("--set", "heads=4"))],
)
def test_export_asks_for_the_resize_rule(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """The help of --resize names the families that need no rule, and the page of the family mentions the option."""
    stated = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5")
    message, hint = wrong("export", golden(name).path, "-o", tmp_path / "bundle", *stated, *options)
    assert message.endswith("the checkpoint does not state the resize rule")
    assert hint.startswith("add --resize METHOD; or add --input tensor")
    assert hint.endswith(f"METHOD: {', '.join(RESIZE_RULES)}")
    family = "vit_pytorch" if name == "vp_vit" else name.partition("_")[0]
    page = Path(__file__).parents[2] / "docs" / "pages" / "models" / f"{family}.md"
    assert "`--resize`" in page.read_text()


def test_the_help_names_the_families_with_a_default_resize_rule() -> None:
    stretched = [family.name for family in FAMILIES if family.default_resize is not None]
    text = " ".join(gmmvit_here("export", "--help", columns=1000).out.replace("│", " ").split())
    assert f"otherwise stretch-bilinear for the families {', '.join(stretched[:-1])} or {stretched[-1]}." in text
