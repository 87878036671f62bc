"""Plain values that a training script stored beside the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.inference.labels import Task

PlainValue: TypeAlias = "str | bytes | int | float | bool | list[PlainValue] | tuple[PlainValue, ...] | set[PlainValue] | dict[PlainValue, PlainValue] | None"  # noqa: E501 - a string cannot be split in a recursive alias
"""Text, bytes, numbers, booleans, None, and lists, tuples, sets and dicts of such values."""


class RecordedOptions(dict[str, PlainValue]):
    """The plain options of a training script.  A reader that asks for one that is not plain gets a CheckpointError.

    A default in place of a class in ``model_kwargs`` would give other logits.
    unread: name of an option → what it holds, such as ``model_kwargs.act_layer as torch.nn.ReLU``.
    parts: name of an option of ``unread`` that is a dict → the values of the dict, in the same form.
    """

    def __init__(
        self,
        plain: Mapping[str, PlainValue] | None = None,
        unread: Mapping[str, str] | None = None,
        *,
        source: str = "",
        parts: Mapping[str, RecordedOptions] | None = None,
    ) -> None:
        super().__init__(plain or {})
        self.unread, self.source, self.parts = unread or {}, source, parts or {}

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is get

    def __contains__(self, name: object) -> bool:
        if name in self.unread:
            within = next(iter(self.parts[str(name)].unread), "") if name in self.parts else ""
            raise self._not_plain(self.unread[str(name)], within)
        return super().__contains__(name)

    def arguments(self, name: str, typed: Collection[str]) -> Mapping[str, PlainValue]:
        """Return the plain values of a dict such as ``model_kwargs``.  typed: the names that the user replaces."""
        if name in self.parts and typed:
            for inner, held in self.parts[name].unread.items():
                if inner not in typed:
                    raise self._not_plain(held, inner)
            return self.parts[name]
        value = self.get(name)
        return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}

    def _not_plain(self, held: str, argument: str) -> CheckpointError:
        replaced = (
            f"type --model-args '{{\"{argument}\": VALUE}}' with a plain value that builds the same network, such as "
            '"relu" for a class of torch.nn; or '
        )
        return CheckpointError(
            f"{self.source}: the file states the option {held}, which is no plain value: gmmvit runs no code of the "
            "file, and a default would give other logits",
            hint=f"{replaced if argument else ''}type --model FILE.py:CLASS with a class that builds the network as "
            "training did; or save the weights alone, with torch.save(network.state_dict(), FILE), and type --model "
            "and --model-args",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """The settings of a training run.  If one contradicts the tensors, a checkpoint source must follow the tensors.

    args: the options of the training script, from the ``argparse.Namespace`` or the dict under ``args``.
    entries: name → text, number or boolean stored at the top level of the file, such as ``arch`` and ``epoch``.
    config: the values of ``config.json`` in a model folder of timm or of transformers.
    of_transformers: True for a model folder of Hugging Face transformers.
    preprocessor, preprocessor_file: the values of the image processor in such a folder, and the name of its file.
    interleaved_head: True if the features of a linear head alternate between class token and mean, as DINO orders them.
    """

    args: RecordedOptions = field(default_factory=RecordedOptions)
    entries: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    of_transformers: bool = False
    preprocessor: Mapping[str, Any] | None = None
    preprocessor_file: str = ""
    interleaved_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownImages:
    """What a checkpoint states about the images of its training; None where it does not.

    mean, std: a number for each channel, for pixel values scaled to [0, 1].
    resize, crop_pct: the resize rule, and the share of the resized image that the centre crop keeps.
    labels: the class names in the order of the class index.  task_evidence: the file with its statement, for messages.
    usual: field → the option of ``gmmvit export`` that states timm's value of the architecture, for hints.
    origins: name of a field → where its value comes from, such as ``mean of args``.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: str | None = None
    crop_pct: float | None = None
    labels: tuple[str, ...] | None = None
    task: Task | None = None
    task_evidence: str = ""
    usual: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
