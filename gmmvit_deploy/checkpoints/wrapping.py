"""Choose the weights in the object that a training script saved, and remove prefixes from the names of the tensors.

    {"epoch": ..., "args": Namespace, "state_dict": {"module.cls_token": ...}}  ->  {"cls_token": ...}

The wrapping is everything around the state dict: outer dicts and prefixes. The wrapping does not determine the
architecture, which `loading` recognises by the names of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gmmvit_deploy.checkpoints.inert import Name, Namespace, OtherTensor, TensorRef, kind_of
from gmmvit_deploy.checkpoints.pickled import RESAVE_HINT
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import WeightsKind
from gmmvit_deploy.models.sources.record import PlainValue, TrainingRecord

__all__ = [
    "WRAPPER_KEYS",
    "ChosenWeights",
    "PlainNames",
    "choose_weights",
    "names_without_prefix",
    "record_of",
    "refuse_choice",
]

_TRAINED = ("model_state_dict", "state_dict", "model", "net")
_AVERAGED = ("state_dict_ema", "model_ema")
_TEACHER = "teacher"  # the key of DINO, which trains a student to match a teacher and evaluates the teacher
WRAPPER_KEYS = (*_TRAINED, *_AVERAGED, _TEACHER)
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
_BACKBONE = "backbone."
_COMPILED_INSIDE = "._orig_mod."  # torch.compile of a part of the model puts this into the names of the part
_DINO_HEAD = re.compile(r"head\.(mlp|last_layer)\.")
_AVERAGES_SEEN = "n_averaged"  # a buffer of torch.optim.swa_utils.AveragedModel
_MAX_DEPTH = 32
_MAX_VALUES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenWeights:
    """The state dict of a file that is to be loaded.

    entries: name → `TensorRef`, or another value of the state dict.
    wrapping: a description of the place of the state dict in the file.
    kind: ``trained`` or ``averaged``; None when the file does not state the kind of its weights.
    """

    entries: Mapping[Any, Any]
    wrapping: str
    kind: WeightsKind | None = None


def choose_weights(path: Path, loaded: object, asked: WeightsKind | None) -> ChosenWeights:
    """Return the state dict of a file.

    loaded: the object in the file.  asked: the kind of weights that the user chose, or None.
    Errors: CheckpointError when the file holds no dict, when it holds trained and averaged weights and ``asked`` is
    None, or when it does not hold the weights that the user chose.
    """
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected a dict of tensors, got {kind_of(loaded)}")
    wrapped = [key for key in WRAPPER_KEYS if isinstance(loaded.get(key), dict)]
    filled = [key for key in wrapped if any(isinstance(v, TensorRef | OtherTensor) for v in loaded[key].values())]
    _refuse_several(path, filled)
    trained = next((key for key in _TRAINED if key in filled), None)
    averaged = next((key for key in _AVERAGED if key in filled), None)
    if trained is None and averaged is None:
        key = next(iter(filled or wrapped), None)
        if asked is not None and key == _TEACHER:
            raise CheckpointError(
                f"{path}: --set weights={asked}, but the file holds a teacher and no trained and averaged weights; the "
                "teacher is taken",
                hint="leave --set weights out",
            )
        refuse_choice(path, asked)
        return _wrapped(loaded, key=key)
    if trained is not None and averaged is not None:
        if asked is None:
            raise CheckpointError(
                f"{path}: holds trained weights under '{trained}' and averaged weights (EMA) under '{averaged}', whose "
                "logits differ",
                hint=f"type --set weights=trained to take '{trained}', or --set weights=averaged to take '{averaged}'",
            )
        return _wrapped(loaded, key=trained if asked == "trained" else averaged, kind=asked)
    only = trained or averaged
    kind: WeightsKind = "averaged" if trained is None else "trained"
    if asked not in (None, kind):
        raise CheckpointError(
            f"{path}: --set weights={asked}, but the file holds only {kind} weights, under '{only}'",
            hint=f"leave --set weights out, or type --set weights={kind}",
        )
    return _wrapped(loaded, key=only, kind=kind)


def _refuse_several(path: Path, filled: list[str]) -> None:
    """Errors: CheckpointError when several keys hold weights of the same kind, so that no option can choose."""
    for kind, keys in (("trained", (*_TRAINED, _TEACHER)), ("averaged", _AVERAGED)):
        held = [key for key in keys if key in filled]
        if len(held) > 1:
            raise CheckpointError(
                f"{path}: holds several sets of {kind} weights, under {' and '.join(map(repr, held))}",
                hint="save only the right state dict with torch.save, for example under the key state_dict",
            )


def _wrapped(loaded: Mapping[Any, Any], *, key: str | None, kind: WeightsKind | None = None) -> ChosenWeights:
    """Return the state dict under ``key``; if ``key`` is None, the whole file is the state dict."""
    if key is None:
        return ChosenWeights(entries=loaded, wrapping="bare state dict")
    return ChosenWeights(entries=loaded[key], wrapping=f"training checkpoint, weights under '{key}'", kind=kind)


def refuse_choice(path: Path, asked: WeightsKind | None) -> None:
    """Check that the user chose no kind of weights for a file with a single set of weights.

    Errors: CheckpointError when ``asked`` is not None.
    """
    if asked is not None:
        raise CheckpointError(
            f"{path}: --set weights={asked}, but the file holds a single set of weights and does not state its kind",
            hint="leave --set weights out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainNames:
    """The names of the tensors in a state dict without the prefixes of wrappers.

    names: name in the file → name without prefix.  prefix: the removed prefix, such as ``_orig_mod.module.``.
    left_out: name in the file → the reason why the entry is no tensor of the model.
    """

    names: dict[str, str]
    prefix: str = ""
    left_out: dict[str, str] = field(default_factory=dict)


def names_without_prefix(names: Iterable[str]) -> PlainNames:
    """Remove the prefixes that wrappers put before the name of every tensor.

    The prefixes ``module.``, ``_orig_mod.``, ``model.`` and ``backbone.`` can occur in any order and number.
    ``_orig_mod.`` is also removed inside of names, where compiled parts of a model have it.
    """
    left = {name: name for name in names}
    left_out: dict[str, str] = {}
    prefix = ""
    if _AVERAGES_SEEN in left and all(name.startswith("module.") for name in left if name != _AVERAGES_SEEN):
        left_out[_AVERAGES_SEEN] = "the number of steps that were averaged"
        del left[_AVERAGES_SEEN]
    while True:
        projection = {name for name, short in left.items() if _DINO_HEAD.match(short)}
        others = [short for name, short in left.items() if name not in projection]
        if projection and others and all(short.startswith(_BACKBONE) for short in others):
            left_out |= dict.fromkeys(projection, "the projection head of DINO's training, which is no classifier")
            left = {name: short for name, short in left.items() if name not in left_out}
        common = next((p for p in _PREFIXES if left and all(short.startswith(p) for short in left.values())), None)
        if common is None:
            inside = {name: short.replace(_COMPILED_INSIDE, ".") for name, short in left.items()}
            if len(set(inside.values())) < len(inside):
                inside = left  # a compiled part beside a part of the same name: no name is changed, so both are seen
            return PlainNames(names=inside, prefix=prefix, left_out=left_out)
        left = {name: short.removeprefix(common) for name, short in left.items()}
        prefix += common


def record_of(path: Path, loaded: object, namespaces: Iterable[Namespace]) -> TrainingRecord:
    """Return the plain values that the training script stored beside the weights.

    namespaces: every namespace in the file, also namespaces whose values are not part of the result.
    Errors: CheckpointError when a namespace holds a value that is not plain; the message names the first such value.
    """
    checked = {id(namespace): _plain_namespace(path, namespace) for namespace in namespaces}
    if not isinstance(loaded, dict):
        return TrainingRecord()
    held = [loaded.get("args"), *loaded.values()]
    first = next((value for value in held if isinstance(value, Namespace)), None)
    return TrainingRecord(
        args=checked[id(first)] if first is not None else _plain_args(loaded.get("args")),
        entries={
            key: value
            for key, value in loaded.items()
            if isinstance(key, str) and isinstance(value, str | int | float | bool)
        },
    )


def _plain_args(args: object) -> dict[str, PlainValue]:
    """Return the options of a training script that saved its options as a dict.

    The result is empty if the options are absent, are no dict, or hold a value that is not plain.
    """
    if not isinstance(args, dict):
        return {}
    try:
        return {str(key): _Plain().value(value, str(key)) for key, value in args.items()}
    except _NotPlainError:
        return {}


def _plain_namespace(path: Path, namespace: Namespace) -> dict[str, PlainValue]:
    try:
        plain = _Plain()
        return {name: plain.value(value, name) for name, value in namespace.values.items()}
    except _NotPlainError as exc:
        raise CheckpointError(
            f"{path}: its argparse.Namespace holds {exc}; expected plain values: text, numbers, booleans, None, and "
            "lists and dicts of them",
            hint=RESAVE_HINT,
        ) from exc


class _NotPlainError(Exception):
    """A value is not plain; the message names the value and its type."""


class _Plain:
    """Copies plain values, and limits their number.

    The limit is necessary because lists that contain the same list many times can expand to billions of values.
    """

    def __init__(self) -> None:
        self._count = 0

    def value(self, value: Any, where: str, depth: int = 0) -> PlainValue:
        """Return a copy of a plain value.

        where: the name of the value, for messages.  depth: the number of containers around the value.
        Errors: _NotPlainError when the value, or a value in it, is not plain, or when the limits are exceeded.
        """
        self._count += 1
        if self._count > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _NotPlainError(f"more than {_MAX_VALUES:,} values, or a value nested more than {_MAX_DEPTH} deep")
        if value is None or isinstance(value, str | bytes | int | float):
            return value
        if isinstance(value, Namespace):
            value = value.values
        if isinstance(value, dict):
            return {
                self.value(key, where, depth + 1): self.value(item, f"{where}.{key}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple | set):
            return type(value)(self.value(item, where, depth + 1) for item in value)
        raise _NotPlainError(f"{where}, a {value.path if isinstance(value, Name) else kind_of(value)}")
