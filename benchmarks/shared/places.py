"""The paths of scripts and results."""

from __future__ import annotations

from pathlib import Path

from gmmvit_deploy.models import families
from gmmvit_deploy.models.families import PRESETS

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"

FAMILIES = tuple(family.name for family in families.FAMILIES if family.name in PRESETS and "gmm" in family.mask_kinds)
"""The names of the paper's families, in the paper's order.  Each has GMM masks and a preset with the family's name."""


def result_of(script: str, *, suffix: str = ".json") -> Path:
    """Return the result file of a script.  The suffix "" makes it a folder with a result for each family."""
    return RESULTS / f"{Path(script).stem}{suffix}"
