"""Choose the weights in the object that a training script saved, and remove prefixes from the names of the tensors.

    {"epoch": ..., "args": Namespace, "state_dict": {"module.cls_token": ...}}  ->  {"cls_token": ...}

The wrapping is everything around the state dict: outer dicts and prefixes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gmmvit_deploy.checkpoints._other_files import RESAVE_HINT, unknown_name
from gmmvit_deploy.checkpoints._pickled import Name, Namespace, OtherTensor, Record, TensorRef, kind_of
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import WEIGHTS_KINDS, WeightsKind
from gmmvit_deploy.models.sources.record import PlainValue, RecordedOptions, TrainingRecord

_TRAINED = ("model_state_dict", "state_dict", "model", "net")
_AVERAGED = ("state_dict_ema", "model_ema")
_TEACHER = "teacher"  # the key of DINO, which trains a student to match a teacher and evaluates the teacher
WRAPPER_KEYS = (*_TRAINED, *_AVERAGED, _TEACHER)
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
_BACKBONE = "backbone."
_COMPILED_INSIDE = "._orig_mod."  # torch.compile of a part of the model puts this into the names of the part
_DINO_HEAD = re.compile(r"head\.(mlp|last_layer)\.")
CLASSIFIER = re.compile(
    r"(head|head_dist|heads|fc|classifier|mlp_head|linear_head|last_linear)(\.(\d+|fc|head|l))*\.weight"
)
_CLASSIFIER_INSIDE = re.compile(rf"(.+\.)?{CLASSIFIER.pattern}")
_OF_TRAINING = re.compile(
    r"(.*_)?(loss|losses|loss_fn|loss_func|loss_function|criterion|criteria|metrics?|accuracy|acc\d*|f1|f1_score|auroc|"
    r"precision|recall|confmat|(pos|class|ce|loss)_weights?)(_.*)?\d*"
)
"""The first part of the name of a tensor of a loss or of a metric, such as ``criterion.weight`` or ``val_acc.tp``."""
_AVERAGES_SEEN = "n_averaged"  # a buffer of torch.optim.swa_utils.AveragedModel
_MAX_KEYS = 3  # in the key of a set of weights, such as ema.shadow
_MAX_DEPTH = 32
_MAX_VALUES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenWeights:
    """The state dict of a file that is to be loaded.

    entries: name → `TensorRef`, or another value of the state dict.
    wrapping: a description of the place of the state dict in the file.
    key: the key of the state dict in the dict of the file; None if the file is the state dict, or for a deeper place.
    kind: ``trained`` or ``averaged``; None when the file does not state the kind of its weights.
    """

    entries: Mapping[Any, Any]
    wrapping: str
    key: str | None = None
    kind: WeightsKind | None = None


def choose_weights(path: Path, loaded: object, asked: str | None) -> ChosenWeights:
    """Return the state dict of a file.

    loaded: the object in the file.
    asked: ``trained``, ``averaged``, or the key of the weights in the file, such as ``ema.shadow``; None if the user
    did not choose.
    Errors: CheckpointError when the file holds no dict, holds several sets of weights and the user chose none, or does
    not hold the weights that the user chose.
    """
    if isinstance(loaded, Name) or (isinstance(loaded, Record) and not loaded):
        raise unknown_name(path, kind_of(loaded), root=True)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected a dict of tensors, got {kind_of(loaded)}", hint=RESAVE_HINT)
    if asked not in (None, *WEIGHTS_KINDS):
        return _named(path, loaded, str(asked))
    wrapped = [key for key in WRAPPER_KEYS if isinstance(loaded.get(key), dict)]
    filled = [key for key in wrapped if any(isinstance(v, TensorRef | OtherTensor) for v in loaded[key].values())]
    _refuse_several(path, filled)
    trained = next((key for key in _TRAINED if key in filled), None)
    averaged = next((key for key in _AVERAGED if key in filled), None)
    if trained is None and averaged is None:
        if not wrapped and (only := _only_set(path, loaded)) is not None:
            refuse_choice(path, asked)
            return _named(path, loaded, only)
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
        # If the file holds a second set, the error names the keys: the file does not say which set is an average.
        _refuse_second_set(path, loaded, str(only))
        raise CheckpointError(
            f"{path}: --set weights={asked}, but the file holds only {kind} weights, under '{only}'",
            hint=f"leave --set weights out, or type --set weights={kind}",
        )
    if asked is None:
        _refuse_second_set(path, loaded, str(only))
    return _wrapped(loaded, key=only, kind=kind)


def _sets_of_weights(
    value: object, place: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Mapping[str, Any] | list[Any]]]:
    """Yield (key, tensors) for each dict by name, and each list, of at least two tensors in an object of the file.

    seen: the containers that were visited: a file may hold the same container many times.
    """
    seen = set() if seen is None else seen
    if not isinstance(value, dict | list | tuple) or id(value) in seen or place.count(".") >= _MAX_KEYS:
        return
    seen.add(id(value))
    if not isinstance(value, dict):
        if place and len(value) > 1 and all(isinstance(entry, TensorRef) for entry in value):
            yield place, list(value)
            return
        value = dict(enumerate(value))
    tensors = {name: entry for name, entry in value.items() if isinstance(name, str) and isinstance(entry, TensorRef)}
    if place and len(tensors) > 1:
        yield place, tensors
        return
    for name, entry in value.items():
        # Optimisers hold tensors of the same shapes as the weights.
        if isinstance(name, str | int) and not str(name).startswith("optim"):
            yield from _sets_of_weights(entry, f"{place}.{name}" if place else str(name), seen)


def _only_set(path: Path, loaded: Mapping[Any, Any]) -> str | None:
    """Return the key of the only weights by name in a file that holds no tensors itself; None for another file."""
    if any(isinstance(value, TensorRef | OtherTensor) for value in loaded.values()):
        return None
    sets = {key: tensors for key, tensors in _sets_of_weights(loaded) if isinstance(tensors, dict)}
    if not sets:
        return None
    largest = max(sets, key=lambda key: len(sets[key]))
    _refuse_second_set(path, loaded, largest)
    return largest if len(sets) == 1 else None


def _named(path: Path, loaded: Mapping[Any, Any], asked: str) -> ChosenWeights:
    """Return the weights under a key."""
    sets = dict(_sets_of_weights(loaded))
    entries = sets.get(asked)
    if isinstance(entries, dict):
        return ChosenWeights(entries=entries, wrapping=f"training checkpoint, weights under '{asked}'")
    for state in (loaded, *(tensors for tensors in sets.values() if isinstance(tensors, dict))):
        if within := part_of(state, asked):
            return ChosenWeights(entries=within, wrapping=f"training checkpoint, keys that begin with '{asked}.'")
    known = [key for key, tensors in sets.items() if isinstance(tensors, dict)]
    what = "tensors without names" if entries is not None else "no weights"
    raise CheckpointError(
        f"{path}: --set weights={asked}, but the file holds {what} under '{asked}'",
        hint=f"type --set weights={' or --set weights='.join(known)}" if known else "leave --set weights out",
    )


def _refuse_second_set(path: Path, loaded: Mapping[Any, Any], chosen: str) -> None:
    """Errors: CheckpointError when another key holds tensors of the same shapes, such as an average."""
    sets = dict(_sets_of_weights(loaded))
    own = _shapes(sets.pop(chosen, {}))
    others = [key for key, tensors in sets.items() if own and _same_weights(own, _shapes(tensors))]
    if others:
        keys = (chosen, *(key for key in others if isinstance(sets[key], dict)))
        what = f"weights under '{chosen}', and tensors of the same shapes under {' and '.join(map(repr, others))}"
        raise must_choose(path, what, keys)


def must_choose(path: Path, what: str, keys: Iterable[str]) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds {what}: an average of the weights (EMA), for example, whose logits differ",
        hint=f"type --set weights={' or --set weights='.join(keys)}",
    )


def _same_weights(own: Iterable[tuple[int, ...]], other: Iterable[tuple[int, ...]]) -> bool:
    """Return True if more than half of the tensors of either set have the shape of one of the other."""
    first, second = Counter(own), Counter(other)
    return 2 * (first & second).total() > max(first.total(), second.total())


def _shapes(tensors: Mapping[str, Any] | list[Any]) -> list[tuple[int, ...]]:
    entries = tensors if isinstance(tensors, list) else tensors.values()
    return [entry.shape for entry in entries if isinstance(entry, TensorRef)]


def part_of(state: Mapping[Any, Any], asked: str | None) -> dict[str, Any]:
    """Return the entries whose names begin with ``asked`` and a dot, without this beginning."""
    prefix = f"{asked}."
    names = [name for name in state if isinstance(name, str) and name.startswith(prefix)] if asked else []
    return {name.removeprefix(prefix): state[name] for name in names}


def _refuse_several(path: Path, filled: list[str]) -> None:
    """Errors: CheckpointError when several keys hold weights of the same kind, so that none can be taken unasked."""
    for kind, keys in (("trained", (*_TRAINED, _TEACHER)), ("averaged", _AVERAGED)):
        held = [key for key in keys if key in filled]
        if len(held) > 1:
            raise must_choose(path, f"several sets of {kind} weights, under {' and '.join(map(repr, held))}", held)


def _wrapped(loaded: Mapping[Any, Any], *, key: str | None, kind: WeightsKind | None = None) -> ChosenWeights:
    if key is None:
        return ChosenWeights(entries=loaded, wrapping="bare state dict")
    wrapping = f"training checkpoint, weights under '{key}'"
    return ChosenWeights(entries=loaded[key], wrapping=wrapping, key=key, kind=kind)


def refuse_choice(path: Path, asked: str | None) -> None:
    """Errors: CheckpointError when the user chose a kind of weights, for a file with a single set of weights."""
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

    Tensors of a loss or metric, which training frameworks save beside the network, need not have them. ``_orig_mod.``
    is also removed inside of names, where compiled parts of a model have it.
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
        network = [short for short in left.values() if not of_training(short)]
        common = next((p for p in _PREFIXES if network and all(short.startswith(p) for short in network)), None)
        if common is None:
            inside = {name: short.replace(_COMPILED_INSIDE, ".") for name, short in left.items()}
            if len(set(inside.values())) < len(inside):
                inside = left  # a compiled part beside a part of the same name: no name is changed, so both are seen
            return PlainNames(names=inside, prefix=prefix, left_out=left_out)
        left = {name: short.removeprefix(common) for name, short in left.items()}
        prefix += common


def of_training(name: str) -> bool:
    """Return True if a tensor has the name of a state of a loss or metric."""
    return _OF_TRAINING.fullmatch(name.partition(".")[0]) is not None


def prefix_of_network(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the prefix of the part of a state dict that has a classifier and more than half of the tensors; else "".

    shapes: name → shape.
    Errors: CheckpointError when another part has the same shapes.
    """
    prefix, left = "", dict(shapes)
    while not _has_classifier(left) and prefix.count(".") < _MAX_KEYS:
        parts: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in left.items():
            first, _, rest = name.partition(".")
            parts.setdefault(first, {})[rest] = shape
        largest = max(parts, key=lambda part: len(parts[part]), default="")
        inner = parts.get(largest, {})
        twins = [part for part in parts if part != largest and _same_weights(parts[part].values(), inner.values())]
        if twins and any(_CLASSIFIER_INSIDE.fullmatch(name) for name in inner):
            names = [f"{prefix}{part}" for part in (largest, *twins)]
            what = f"tensors of the same shapes under {' and '.join(f'{name}.' for name in names)}"
            raise must_choose(path, what, names)
        if 2 * len(inner) <= len(left):
            return ""
        prefix, left = f"{prefix}{largest}.", inner
    return prefix if _has_classifier(left) else ""


def _has_classifier(names: Iterable[str]) -> bool:
    return any(CLASSIFIER.fullmatch(name) for name in names)


def record_of(path: Path, loaded: object) -> TrainingRecord:
    """Return the plain values that the training script stored beside the weights."""
    if not isinstance(loaded, dict):
        return TrainingRecord()
    held = [loaded.get("args"), *loaded.values()]
    first = next((value for value in held if isinstance(value, Namespace)), None)
    return TrainingRecord(
        args=_plain_args(path, loaded.get("args") if first is None else first.values),
        entries={
            key: value
            for key, value in loaded.items()
            if isinstance(key, str) and isinstance(value, str | int | float | bool)
        },
    )


def _plain_args(path: Path, args: object) -> RecordedOptions:
    plain, held = _Plain(), args if isinstance(args, dict) else {}
    options, unread = plain.entries(held)
    parts = {
        name: RecordedOptions(*plain.entries(held[name], (name,)), source=str(path))
        for name in unread
        if isinstance(held.get(name), dict)
    }
    return RecordedOptions(options, unread, source=str(path), parts=parts)


class _NotPlainError(Exception):
    """A value is not plain, or the values are too many."""


class _Plain:
    """Copies plain values, of a limited number: lists that hold the same list many times can expand to billions."""

    def __init__(self) -> None:
        self._count = 0

    def entries(
        self, values: Mapping[Any, Any], place: tuple[str, ...] = ()
    ) -> tuple[dict[str, PlainValue], dict[str, str]]:
        """Return (the plain values of a dict, what the others hold), by name."""
        options, unread = {}, {}
        for key, value in values.items():
            try:
                options[str(key)] = self.value(value, (*place, str(key)))
            except _NotPlainError as exc:
                unread[str(key)] = str(exc)
        return options, unread

    def value(self, value: Any, place: tuple[str, ...]) -> PlainValue:
        """Return a copy of a plain value.  place: the name of the option, and the keys of the containers around it."""
        self._count += 1
        if self._count > _MAX_VALUES or len(place) > _MAX_DEPTH:
            raise _NotPlainError(f"{place[0]}, of more than {_MAX_VALUES} values or {_MAX_DEPTH} levels")
        if value is None or isinstance(value, str | bytes | int | float):
            return value
        if isinstance(value, Namespace):
            value = value.values
        if isinstance(value, dict) and not (isinstance(value, Record) and not value):
            return {self.value(key, place): self.value(item, (*place, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple | set):
            return type(value)(self.value(item, (*place, str(n))) for n, item in enumerate(value))
        raise _NotPlainError(f"{'.'.join(place)} as {kind_of(value)}")
