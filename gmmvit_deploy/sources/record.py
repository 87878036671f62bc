"""Plain values that a training script stored beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["PlainValue", "TrainingRecord"]

PlainValue: TypeAlias = "str | bytes | int | float | bool | list[PlainValue] | tuple[PlainValue, ...] | set[PlainValue] | dict[PlainValue, PlainValue] | None"  # noqa: E501 - a string cannot be split in a recursive alias
"""Text, bytes, numbers, booleans, None, and lists, tuples, sets and dicts of such values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """The settings of a training run, as read from the checkpoint of the run.

    If a setting contradicts the tensors, a checkpoint source must follow the tensors.
    args: name → value for the options of the training script, from the ``argparse.Namespace`` or the dict under
    ``args``; empty if the file has no such entry.
    entries: name → text, number or boolean stored at the top level of the file, such as ``arch`` and ``epoch``.
    """

    args: Mapping[str, PlainValue] = field(default_factory=dict)
    entries: Mapping[str, str | int | float | bool] = field(default_factory=dict)
