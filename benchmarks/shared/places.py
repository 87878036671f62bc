"""Where scripts and results are."""

from __future__ import annotations

from pathlib import Path

from gmmvit_deploy import families
from gmmvit_deploy.families import PRESETS

__all__ = ["BENCHMARKS", "FAMILIES", "KINDS", "RESULTS", "ROOT", "result_of", "scripts"]

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
KINDS = ("reported", "settings", "rejected")
"""Folders of scripts; results/ has the same."""

FAMILIES = tuple(family.name for family in families.FAMILIES if family.name in PRESETS and "gmm" in family.mask_kinds)
"""Names of the paper's, in its order: those with a Gaussian mixture mask and a preset of the family's own name."""


def result_of(script: str, *, suffix: str = ".json") -> Path:
    """A script's file → where its result is written; with suffix "", a folder that has a result for each family."""
    path = Path(script)
    return RESULTS / path.parent.name / f"{path.stem}{suffix}"


def scripts(kind: str) -> list[Path]:
    """Every script of a kind: the files that a reader can run."""
    files = sorted((BENCHMARKS / kind).glob("*.py"))
    return [path for path in files if "\nif __name__ ==" in path.read_text(encoding="utf-8")]
