"""Read the pickle inside a PyTorch file as inert data, without importing or calling anything that the pickle names.

    pickle opcodes ──> dicts, lists, numbers, text, `TensorRef`, `Namespace`, `Record`

`pickletools` splits the bytes into opcodes and `_Machine` interprets them. A name in the file is only compared with the
tables of `_inert`, whose functions build plain containers and descriptions of tensors. What any other name would build
becomes a `Record` of the name. This module does not read the elements of tensors.
"""

from __future__ import annotations

import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from gmmvit_deploy.checkpoints._inert import (
    BUILDERS,
    NAMESPACE,
    NUMPY_DTYPE,
    NUMPY_SCALARS,
    Name,
    Namespace,
    Record,
    StorageRef,
    checked_key,
    dtype_of_storage,
    kind_of,
    known_name,
    whole_number,
)
from gmmvit_deploy.checkpoints._other_files import RESAVE_HINT, unknown_name
from gmmvit_deploy.errors import CheckpointError

_MAX_BYTES = 64 << 20  # a checkpoint of 2,400 tensors has a pickle of about half a megabyte
_MAX_OPCODES = 5_000_000


def _too_large(path: Path, limit: str) -> CheckpointError:
    return CheckpointError(f"{path}: expected a list of tensors of at most {limit}, got more", hint=RESAVE_HINT)


def read_pickle(path: Path, file: IO[bytes], storages: dict[str, StorageRef], *, known: bool = False) -> Any:
    """Interpret the pickle at the position of ``file``, and return the value of the pickle.

    The position of ``file`` is afterwards the first byte after the pickle.
    path: the path of the file, for messages.
    storages: the function adds each storage of the pickle.
    known: True to refuse a name that is not in the tables of `_inert`.
    Errors:
        CheckpointError: the pickle is too large, or names an unknown function or class with ``known``.
        ValueError: the bytes are a damaged pickle or no pickle.
    """
    machine = _Machine(path, storages, known=known)
    try:
        return machine.run(_Bounded(path, file))
    # A damaged pickle pops from an empty stack, reads an unset memo entry, or passes arguments of unexpected types.
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, EOFError, RecursionError) as exc:
        raise ValueError(f"damaged pickle: {type(exc).__name__} {exc}") from exc


class _Bounded:
    """A binary file that refuses to read more than 64 MiB.  Errors: CheckpointError."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._left = _MAX_BYTES

    def read(self, count: int) -> bytes:
        return self._spent(self._file.read(count) if count <= self._left else b"", count)

    def readline(self) -> bytes:
        line = self._file.readline(self._left + 1)
        return self._spent(line, len(line))

    def _spent(self, data: bytes, count: int) -> bytes:
        if count > self._left:
            raise _too_large(self._path, f"{_MAX_BYTES:,} bytes")
        self._left -= len(data)
        return data


class _Machine:
    """The stack machine of the pickle format, protocols 2 to 5, limited to opcodes for data."""

    def __init__(self, path: Path, storages: dict[str, StorageRef], *, known: bool) -> None:
        self._path = path
        self._storages = storages
        self._known = known
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each MARK
        self._memo: dict[int, Any] = {}

    def run(self, file: _Bounded) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):  # type: ignore[arg-type]
            if count >= _MAX_OPCODES:
                raise _too_large(self._path, f"{_MAX_OPCODES:,} instructions")
            name = opcode.name
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _TUPLES:
                self._small_tuple(_TUPLES[name])
            elif name not in ("PROTO", "FRAME", "STOP"):
                step = _STEPS.get(name)
                if step is None:
                    raise ValueError(f"pickle opcode {name}, which no PyTorch file uses")
                step(self, argument)
        return self._stack.pop()

    def _from_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _tuple(self, _: Any) -> None:
        items = self._from_mark()
        self._stack.append(tuple(items))

    def _small_tuple(self, count: int) -> None:
        items = self._stack[-count:]
        if len(items) < count:
            raise ValueError(f"a tuple takes {count} values, but the stack of the pickle holds {len(items)}")
        self._stack[-count:] = [tuple(items)]

    def _append(self, _: Any) -> None:
        item = self._stack.pop()
        self._listed([item])

    def _appends(self, _: Any) -> None:
        self._listed(self._from_mark())

    def _listed(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Record):
            return
        if type(target) is not list:
            raise ValueError(f"list items for a {kind_of(target)}")
        target.extend(items)

    def _additems(self, _: Any) -> None:
        items = self._from_mark()
        target = self._stack[-1]
        if isinstance(target, Record):
            return
        if type(target) is not set:
            raise ValueError(f"set items for a {kind_of(target)}")
        target.update(checked_key(item) for item in items)

    def _frozenset(self, _: Any) -> None:
        items = self._from_mark()
        self._stack.append({checked_key(item) for item in items})

    def _setitem(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _setitems(self, _: Any) -> None:
        self._set(self._from_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict, Counter, Record) or len(items) % 2:
            raise ValueError(f"{len(items)} keys and values for a {kind_of(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[checked_key(key)] = value

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _global(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        known = known_name(module, name)
        if known is None and self._known:
            raise unknown_name(self._path, f"{module}.{name}", root=not self._stack and not self._below)
        self._stack.append(known or Name(f"{module}.{name}"))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("STACK_GLOBAL without two texts")
        self._push_name(module, name)

    def _reduce(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not (isinstance(function, Name | Record) and isinstance(arguments, tuple)):
            raise ValueError(f"a call of a {kind_of(function)}")
        name = kind_of(function)
        unknown = next((item for item in arguments if isinstance(item, Record)), None)
        if isinstance(function, Record) or name not in BUILDERS:
            self._stack.append(Record(name))
        elif unknown is not None and name not in NUMPY_SCALARS:
            self._stack.append(Record(unknown.name))  # such as a tensor of a storage that nothing here reads
        else:
            self._stack.append(BUILDERS[name](*arguments))

    def _newobj(self, _: Any) -> None:
        arguments, cls = self._stack.pop(), self._stack.pop()
        if not isinstance(cls, Name | Record):
            raise ValueError(f"a new object of a {kind_of(cls)}")
        if kind_of(cls) == NAMESPACE and arguments != ():
            raise ValueError("an argparse.Namespace with arguments")
        self._stack.append(Namespace() if kind_of(cls) == NAMESPACE else Record(kind_of(cls)))

    def _newobj_ex(self, _: Any) -> None:
        self._stack.pop()  # the named arguments
        self._newobj(_)

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Record):
            target.parts += (state,) if target.name == NUMPY_DTYPE else ()
        elif isinstance(target, Namespace):
            if type(state) is not dict or not all(isinstance(key, str) for key in state):
                raise ValueError("an argparse.Namespace whose state is no dict of names")
            target.values.update(state)
        elif type(target) is not OrderedDict:  # drop the version numbers that torch attaches to state dicts
            raise ValueError(f"the pickle sets the state of a {kind_of(target)}, which has no state")

    def _persistent(self, _: Any) -> None:
        reference = self._stack.pop()
        if reference[0] == "module":  # the class of a whole network, with its source, before torch 1.6
            self._stack.append(reference[1])
            return
        kind, storage_type, key, _location, numel, *rest = reference
        dtype = dtype_of_storage(storage_type.path)
        if kind != "storage" or dtype is None or not isinstance(key, str):
            raise ValueError("a reference to something other than the numbers of a tensor")
        view = None
        if rest and rest[0] is not None:
            _, first, length = rest[0]
            view = (whole_number(first), whole_number(length))
        ref = StorageRef(key=key, dtype=dtype, numel=whole_number(numel), view=view)
        self._storages.setdefault(key, ref)
        self._stack.append(ref)


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_LITERALS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    }
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "TUPLE": _Machine._tuple,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "ADDITEMS": _Machine._additems,
    "FROZENSET": _Machine._frozenset,
    "SETITEM": _Machine._setitem,
    "SETITEMS": _Machine._setitems,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._put,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._newobj,
    "NEWOBJ_EX": _Machine._newobj_ex,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
}
