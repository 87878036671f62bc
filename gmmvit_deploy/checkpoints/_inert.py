"""The values that a pickle of a PyTorch file may hold, and the names by which the pickle may build these values.

A name in the file is only compared with the tables of this module. The functions of the tables build plain containers,
numbers and descriptions of tensors. Whatever any other name would build becomes a `Record`, which holds the name.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """A storage in the file: a block of elements that tensors refer to.

    key: the name of the storage in the file.  dtype: the data type of the elements.  numel: the number of elements.
    view: (first element, number of elements) of the part that a tensor refers to, in older files only; None for the
    whole storage.
    """

    key: str
    dtype: str
    numel: int
    view: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A dense tensor in the file, not yet read.

    storage: the storage with the elements of the tensor.  offset: the first element of the tensor in the storage.
    stride: the step in the storage for each dimension.  ``offset`` and ``stride`` count elements of ``dtype``.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class OtherTensor:
    """A tensor that this package does not read, such as a sparse or quantised tensor.

    kind: the PyTorch function that would build the tensor, or ``conjugate`` for a lazily conjugated or negated tensor.
    """

    kind: str


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
    """Return a `Name`, or None if the name is not in the tables of this module."""
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
        return OtherTensor("conjugate")
    return _described(storage, offset, size, stride, dtype=None)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef | OtherTensor:
    """Describe the tensor that ``torch._utils._rebuild_tensor_v3`` would build.

    Unlike version 2, version 3 stores the data type of the tensor.
    """
    if metadata:
        return OtherTensor("conjugate")
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


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    if encoding is not None:
        return bytearray(_encoded(data, {"latin-1": "latin1"}.get(encoding, encoding)))
    if not isinstance(data, bytes):  # bytearray(n) would allocate n bytes
        raise ValueError("a bytearray of no bytes")
    return bytearray(data)


def _counter(values: Any = ()) -> Counter[Any]:
    if not isinstance(values, dict) and values != ():
        raise ValueError("a Counter of no dict")
    return Counter(dict(values))


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
        f"torch._utils.{function}": lambda *_, kind=function: OtherTensor(kind)
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
    "collections.Counter": _counter,
    "builtins.set": lambda items=(): {checked_key(item) for item in items},
    "builtins.complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "builtins.bytearray": _bytearray,
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
