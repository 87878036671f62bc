"""Make the table of attention with a constant mask on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.shared.results import interval, table


def masked_attention_table(attentions: Mapping[str, Any]) -> str:
    """Return a table with a row for each shape and data type: the time of each program / the time of ``plain``.

    attentions: shape and data type → name of a program → its row in the result of ``masked_attention_gpu``.
    """
    programs = [name for name in next(iter(attentions.values())) if name != "plain"]
    rows = [
        (name, f"{row['plain']['ms']:.3f}", *(interval(row[program]["over_plain"]) for program in programs))
        for name, row in attentions.items()
    ]
    return table(("shape, data type", "plain, ms", *programs), rows)
