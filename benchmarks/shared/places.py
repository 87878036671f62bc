"""Where scripts and results are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BENCHMARKS", "FAMILIES", "KINDS", "RESULTS", "ROOT", "result_of", "scripts"]

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
KINDS = ("reported", "settings", "rejected")
"""Folders of scripts; results/ has the same."""

FAMILIES = ("vit", "swin", "cait", "pit", "t2t")
"""The paper's, in its order."""


def result_of(script: str, *, suffix: str = ".json") -> Path:
    """A script's file → where its result is written; with suffix "", a folder that has a result for each family."""
    path = Path(script)
    return RESULTS / path.parent.name / f"{path.stem}{suffix}"


def scripts(kind: str) -> list[Path]:
    """Every script of a kind: the files that a reader can run."""
    files = sorted((BENCHMARKS / kind).glob("*.py"))
    return [path for path in files if "\nif __name__ ==" in path.read_text(encoding="utf-8")]
