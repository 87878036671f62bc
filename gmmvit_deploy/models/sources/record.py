"""Plain values that a training script stored beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gmmvit_deploy.images.labels import Task

__all__ = ["KnownImages", "PlainValue", "TrainingRecord"]

PlainValue: TypeAlias = "str | bytes | int | float | bool | list[PlainValue] | tuple[PlainValue, ...] | set[PlainValue] | dict[PlainValue, PlainValue] | None"  # noqa: E501 - a string cannot be split in a recursive alias
"""Text, bytes, numbers, booleans, None, and lists, tuples, sets and dicts of such values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """The settings of a training run, as read from the checkpoint of the run.

    If a setting contradicts the tensors, a checkpoint source must follow the tensors.
    args: name → value for the options of the training script, from the ``argparse.Namespace`` or the dict under
    ``args``; empty if the file has no such entry.
    entries: name → text, number or boolean stored at the top level of the file, such as ``arch`` and ``epoch``.
    config: the values of ``config.json`` in a model folder of timm or of transformers; empty for any other file.
    of_transformers: True for a model folder of Hugging Face transformers.
    preprocessor: the values of the image processor in such a folder; None if the folder has none.
    preprocessor_file: the name of the file that holds them; empty if the folder has none.
    interleaved_head: True if the features of a linear head alternate between class token and mean, as DINO orders them.
    """

    args: Mapping[str, PlainValue] = field(default_factory=dict)
    entries: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    of_transformers: bool = False
    preprocessor: Mapping[str, Any] | None = None
    preprocessor_file: str = ""
    interleaved_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownImages:
    """What a checkpoint states about the images of its training.  A value that the checkpoint does not state is None.

    mean, std: a number for each channel, for pixel values scaled to [0, 1].
    resize, crop_pct: the resize rule, and the share of the resized image that the centre crop keeps.
    labels: the class names in the order of the class index.
    task: whether an image has one label or several.  task_evidence: the file with its statement, for messages.
    usual_resize: the options of ``gmmvit export`` for the default resize rule of the architecture, for hints; empty if
    the rule is not known.
    origins: name of a field → where its value comes from, such as ``mean of args``.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: str | None = None
    crop_pct: float | None = None
    labels: tuple[str, ...] | None = None
    task: Task | None = None
    task_evidence: str = ""
    usual_resize: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
