"""Read the pickle inside a PyTorch file as inert data, without importing or calling anything that the pickle names.

    pickle opcodes ──> dicts, lists, numbers, text, `TensorRef`, `Namespace`, `Record`

`pickletools` splits the bytes into opcodes and `_Machine` interprets them. A name in the file is only compared with the
tables of this module, whose functions build plain containers, numbers and descriptions of tensors. What any other name
would build becomes a `Record` of the name. This module does not read the elements of tensors.
"""

from __future__ import annotations

import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gmmvit_deploy.checkpoints._other_files import RESAVE_HINT, unknown_name
from gmmvit_deploy.errors import CheckpointError

_MAX_BYTES = 64 << 20  # a checkpoint of 2,400 tensors has a pickle of about half a megabyte
_MAX_OPCODES = 5_000_000
_MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Name:
    """A name in the file, such as ``torch.float32``, kept as text: the object of this name is never imported."""

    path: str


class Record(dict[Any, Any]):
    """What a function or class outside the tables of this module would build, such as a ``pathlib.PosixPath``.

    The items are those of a dict, such as a configuration, and empty for any other object.
    name: the function or class.  parts: the arguments and the state of a ``numpy.dtype``; empty for any other object.
    """

    def __init__(self, name: str, *parts: Any) -> None:
        super().__init__()
        self.name, self.parts = name, parts


@dataclass(slots=True, eq=False)
class Namespace:
    """The values of an ``argparse.Namespace`` in the file.  `_wrapping.record_of` takes those that are plain."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage in the file: a block of ``numel`` elements that tensors refer to.

    view: (first element, number of elements) of the part that a tensor refers to, in older files only.
    """

    key: str
    dtype: str
    numel: int
    view: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A dense tensor in the file, not yet read.

    offset: the first element of the tensor in the storage.  ``offset`` and ``stride`` count elements of ``dtype``.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class OtherTensor:
    """A tensor that this package does not read: sparse, quantised, or lazily conjugated or negated."""


def kind_of(value: object) -> str:
    """Return the type of a value of the file, for messages, such as ``torch.Tensor``."""
    if isinstance(value, Name):
        return value.path
    if isinstance(value, Record):
        return value.name
    if isinstance(value, TensorRef | OtherTensor):
        return "torch.Tensor"
    return "argparse.Namespace" if isinstance(value, Namespace) else type(value).__name__


def checked_key(key: Any) -> Any:
    """Return the key of a dict or a set unchanged, or the name of a key that is no data.

    Errors: ValueError when the key is not a plain value or a flat tuple of plain values. Nested tuples are refused,
    because hashing a deeply nested tuple exhausts the C stack.
    """
    if isinstance(key, Name | Record):
        return kind_of(key)
    simple = isinstance(key, str | bytes | int | float | None)
    if not simple and not (isinstance(key, tuple) and all(isinstance(k, str | int | float | None) for k in key)):
        raise ValueError(f"a dict has a key of type {kind_of(key)}")
    return key


def whole_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number of at least 0, got a {kind_of(value)}")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > _MAX_DIMENSIONS:
        raise ValueError("a shape that is no tuple, or has too many dimensions")
    return tuple(whole_number(value) for value in values)


def known_name(module: str, name: str) -> Name | None:
    module = {"__builtin__": "builtins"}.get(module, module)  # the name of this module in Python 2
    full = f"{module}.{name}"
    known = full in BUILDERS or full in _TYPES or _INERT.fullmatch(full) or dtype_of_storage(full) is not None
    return Name(full) if known else None


def dtype_of_storage(name: str) -> str | None:
    """Return the data type of a storage class by its name in the file, such as ``torch.FloatStorage``, or None."""
    return _STORAGES.get(name.replace("torch.cuda.", "torch."))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRef | OtherTensor:
    """Describe the tensor that ``torch._utils._rebuild_tensor_v2`` would build."""
    if len(rest) > 2 and rest[2]:  # a lazily conjugated or negated tensor
        return OtherTensor()
    return _described(storage, offset, size, stride, dtype=None)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef | OtherTensor:
    """Describe the tensor that ``torch._utils._rebuild_tensor_v3`` would build, which stores its data type."""
    if metadata:
        return OtherTensor()
    if not isinstance(dtype, Name):
        raise ValueError("a tensor without data type")
    return _described(storage, offset, size, stride, dtype=dtype.path.removeprefix("torch."))


def _described(storage: Any, offset: Any, size: Any, stride: Any, *, dtype: str | None) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise ValueError(f"a tensor whose storage is a {kind_of(storage)}")
    shape, strides = _wholes(size), _wholes(stride)
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of shape {shape} with strides {strides}")
    return TensorRef(storage, whole_number(offset), shape, strides, dtype or storage.dtype)


def _parameter(tensor: Any, *_: Any) -> TensorRef | OtherTensor:
    if not isinstance(tensor, TensorRef | OtherTensor):
        raise ValueError(f"a torch Parameter is made from a {kind_of(tensor)} instead of a tensor")
    return tensor


def _tensor_with_type(function: Any, kind: Any, arguments: Any, *_: Any) -> TensorRef | OtherTensor | Record:
    """Describe a tensor that was saved with Python attributes.  The attributes are dropped."""
    if not (isinstance(function, Name) and isinstance(kind, Name)):
        raise ValueError("a tensor without type")
    if kind.path not in _TYPES:
        return Record(kind.path)
    if function.path not in _TENSOR_BUILDERS:
        return Record(function.path)
    return _TENSOR_BUILDERS[function.path](*arguments)


def _encoded(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":  # pickle protocol 2 stores bytes as latin1 text
        raise ValueError("bytes in an unknown encoding")
    return bytes(text.encode("latin1"))


def _numpy_scalar(dtype: Any, data: Any = None) -> Any:
    """Return the number of a scalar of numpy; a `Record` for other scalars, such as texts and dates."""
    import numpy as np

    form, *state = dtype.parts if isinstance(dtype, Record) else ("",)
    native = not state or (isinstance(state[0], tuple) and state[0][1:2] in [("<",), ("|",)])
    if not (
        isinstance(form, str) and re.fullmatch("b1|[iu][1248]|f[248]", form) and isinstance(data, bytes) and native
    ):
        return Record("numpy scalar")
    return np.frombuffer(data, f"<{form}", count=1)[0].item()


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((checked_key(key), value) for key, value in pairs)


_TENSOR_BUILDERS: Mapping[str, Callable[..., TensorRef | OtherTensor]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    **{
        f"torch._utils.{function}": lambda *_: OtherTensor()
        for function in ("_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_meta_tensor_no_storage")
    },
}
TENSOR_WITH_TYPE = "torch._tensor._rebuild_from_type_v2"
NAMESPACE = "argparse.Namespace"
NUMPY_DTYPE = "numpy.dtype"
NUMPY_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_TYPES = (NAMESPACE, "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
BUILDERS: Mapping[str, Callable[..., Any]] = {
    **_TENSOR_BUILDERS,
    TENSOR_WITH_TYPE: _tensor_with_type,
    "collections.OrderedDict": _ordered,
    "builtins.set": lambda items=(): {checked_key(item) for item in items},
    "_codecs.encode": _encoded,
    "numpy.dtype": lambda form, *_: Record(NUMPY_DTYPE, form),
    **dict.fromkeys(NUMPY_SCALARS, _numpy_scalar),
    "torch.Size": lambda sizes: _wholes(sizes),
    "torch.device": lambda *_: Name("torch.device"),
    "torch.serialization._get_layout": lambda *_: Name("torch.layout"),
}
_INERT = re.compile(r"torch\.(bool|b?float\d\w*|complex\d+|q?u?int\d+\w*|bits\w+|per_(tensor|channel)_\w+)")
_STORAGES = {
    "torch.storage.UntypedStorage": "uint8",
    "torch.UntypedStorage": "uint8",
    **{
        f"torch.{storage}Storage": dtype
        for storage, dtype in {
            "Double": "float64",
            "Float": "float32",
            "Half": "float16",
            "BFloat16": "bfloat16",
            "Long": "int64",
            "Int": "int32",
            "Short": "int16",
            "Char": "int8",
            "Byte": "uint8",
            "Bool": "bool",
            "ComplexDouble": "complex128",
            "ComplexFloat": "complex64",
            "QInt8": "qint8",
            "QUInt8": "quint8",
            "QInt32": "qint32",
            "QUInt4x2": "quint4x2",
            "QUInt2x4": "quint2x4",
        }.items()
    },
}


def _too_large(path: Path, limit: str) -> CheckpointError:
    return CheckpointError(f"{path}: expected a list of tensors of at most {limit}, got more", hint=RESAVE_HINT)


def read_pickle(path: Path, file: IO[bytes], storages: dict[str, StorageRef], *, known: bool = False) -> Any:
    """Interpret the pickle at the position of ``file``, and return the value of the pickle.

    The position of ``file`` is afterwards the first byte after the pickle.
    storages: the function adds each storage of the pickle.
    known: True to refuse a name that is not in the tables of this module.
    Errors: CheckpointError when the pickle is too large, or names an unknown function or class with ``known``;
    ValueError when the bytes are a damaged pickle or no pickle.
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
        if type(target) not in (dict, OrderedDict, Record) or len(items) % 2:
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
