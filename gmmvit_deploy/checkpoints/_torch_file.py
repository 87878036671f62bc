"""The two formats of `torch.save`: a zip archive (torch 1.6 and later) and a sequence of pickles (before torch 1.6).

    zip archive   a record PREFIX/data.pkl, and a record PREFIX/data/KEY with the elements of each storage
    older file    five pickles: magic number, format version, byte order and type sizes, data, list of storage keys;
                  then for each storage key: the number of elements as int64, and the elements

Opening a file reads only the pickles. `TorchFile.tensor` reads the storage of a tensor on request: the state of an
optimiser is never read. Tensors that share a storage in the file also share it in memory.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from gmmvit_deploy.checkpoints._other_files import EXPECTED, RESAVE_HINT, refuse_archive
from gmmvit_deploy.checkpoints._pickled import OtherTensor, StorageRef, TensorRef, read_pickle
from gmmvit_deploy.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
_MAX_PICKLE_BYTES = 64 << 20
_PLAIN_DTYPE = re.compile(r"bool|b?float|complex|u?int")  # not quantised, not raw bits


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """An open PyTorch file.

    value: the object that `torch.save` saved, with a `TensorRef` or an `OtherTensor` for each tensor.
    spans: key of a storage → (first byte, number of bytes) in the file.
    checksums: key of a storage → CRC-32 of its bytes, where the file states it.
    storages: key of a storage → the storage, for those that were already read.
    """

    path: Path
    value: Any
    spans: Mapping[str, tuple[int, int]]
    big_endian: bool
    file: BufferedReader
    storages: dict[str, UntypedStorage] = field(default_factory=dict)
    checksums: Mapping[str, int] = field(default_factory=dict)

    def tensor(self, name: str, ref: TensorRef | OtherTensor) -> Tensor:
        """Read a tensor.  Errors: CheckpointError when it is sparse, quantised, expanded or damaged."""
        import torch

        dtype = getattr(torch, ref.dtype, None) if isinstance(ref, TensorRef) else None
        if not isinstance(ref, TensorRef) or not isinstance(dtype, torch.dtype) or not _PLAIN_DTYPE.match(ref.dtype):
            raise self._not_plain(name)
        try:
            storage_itemsize = getattr(torch, ref.storage.dtype).itemsize
            first, length = ref.storage.view or (0, ref.storage.numel)
            held_bytes = length * storage_itemsize
            # An expanded tensor repeats the elements of a small storage, so copying the tensor could need far more
            # memory than the size of the file. Such tensors are refused.
            if held_bytes < math.prod(ref.shape) * dtype.itemsize:
                raise self._not_plain(name)
            last = sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True))
            if 0 not in ref.shape and (ref.offset + last + 1) * dtype.itemsize > held_bytes:
                raise ValueError(f"{name} extends beyond the end of its storage")
            storage = self._storage(ref.storage, storage_itemsize)
            # `first` counts elements of the storage, and `ref.offset` counts elements of the tensor. torch.save writes
            # views only in the older format, in which a storage has the data type of its tensors.
            return torch.empty(0, dtype=dtype).set_(storage, first + ref.offset, ref.shape, ref.stride)
        except (ValueError, TypeError, RuntimeError, OverflowError) as exc:
            raise damaged(self.path, name) from exc

    def _storage(self, ref: StorageRef, itemsize: int) -> UntypedStorage:
        import torch

        if ref.key not in self.storages:
            start, byte_count = self.spans.get(ref.key, (0, -1))
            if byte_count != ref.numel * itemsize:
                raise ValueError(f"storage {ref.key} has {byte_count} bytes, expected {ref.numel * itemsize}")
            numbers = torch.empty(byte_count, dtype=torch.uint8)
            self.file.seek(start)
            if byte_count and self.file.readinto(numbers.numpy().data) != byte_count:
                raise ValueError(f"storage {ref.key} is cut off")
            expected = self.checksums.get(ref.key)
            if expected is not None and crc32(numbers.numpy().data) != expected:
                raise ValueError(f"storage {ref.key} does not match its checksum")
            self.storages[ref.key] = numbers.untyped_storage()
            if self.big_endian:
                self.storages[ref.key].byteswap(getattr(torch, ref.dtype))
        return self.storages[ref.key]

    def _not_plain(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: expected {name} to be a dense tensor, not sparse, quantised or expanded",
            hint="save the state dict of the float32 model; gmmvit convert writes other precisions of a bundle",
        )


def damaged(path: Path, name: str = "") -> CheckpointError:
    """Return the error for a damaged file.  name: the tensor that cannot be read, if any."""
    place = f" at tensor {name}" if name else ""
    return CheckpointError(
        f"{path}: the file is truncated or damaged{place} ({path.stat().st_size} bytes)",
        hint="copy or download the file again",
    )


@contextmanager
def open_torch_file(path: Path) -> Iterator[TorchFile]:
    """Open a PyTorch file of either format.  Tensors can be read until the context ends.

    Errors: CheckpointError when the file is damaged, too large, or of another kind.
    """
    with path.open("rb") as file:
        zipped = file.read(4) == _ZIP_MAGIC
        file.seek(0)
        yield _from_zip(path, file) if zipped else _from_pickles(path, file)


def _from_zip(path: Path, file: BufferedReader) -> TorchFile:
    try:
        with zipfile.ZipFile(file) as archive:
            refuse_archive(path, archive.namelist())
            records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        spans = {name: _span(file, record) for name, record in records.items()}
        # With torch.serialization.set_crc32_options(False), torch.save writes 0 in place of each checksum.
        checksums = {name: record.CRC for name, record in records.items() if record.CRC}
        # Overlapping records can have more bytes in total than the file, and reading them could exhaust the memory.
        if sum(byte_count for _, byte_count in spans.values()) > os.fstat(file.fileno()).st_size:
            raise ValueError("the records of the archive are larger than the file")
        pickled = _record(path, file, spans["data.pkl"])
        if crc32(pickled) != checksums.get("data.pkl", crc32(pickled)):
            raise ValueError("data.pkl does not match its checksum")
        value = read_pickle(path, BytesIO(pickled), {})
        return TorchFile(
            path=path,
            value=value,
            spans={name.removeprefix("data/"): place for name, place in spans.items() if name.startswith("data/")},
            checksums={name.removeprefix("data/"): crc for name, crc in checksums.items() if name.startswith("data/")},
            big_endian="byteorder" in spans and _record(path, file, spans["byteorder"]) == b"big",
            file=file,
        )
    except (zipfile.BadZipFile, ValueError, KeyError, struct.error, NotImplementedError, OSError) as exc:
        raise damaged(path) from exc


def _span(file: BufferedReader, record: zipfile.ZipInfo) -> tuple[int, int]:
    """Return (first byte, number of bytes) of a record's content.  Errors: ValueError: compressed, or no header."""
    file.seek(record.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != _ZIP_MAGIC or record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{record.filename} is compressed, or has no local header at its offset")
    return record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes, record.file_size


def _record(path: Path, file: BufferedReader, span: tuple[int, int]) -> bytes:
    start, byte_count = span
    if byte_count > _MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path}: expected each record that describes the tensors (data.pkl, byteorder) to have at most "
            f"{_MAX_PICKLE_BYTES:,} bytes, got {byte_count:,}",
            hint=RESAVE_HINT,
        )
    file.seek(start)
    return file.read(byte_count)


def _from_pickles(path: Path, file: BufferedReader) -> TorchFile:
    storages: dict[str, StorageRef] = {}
    try:
        magic_number = read_pickle(path, file, {}, known=True)
    except ValueError as exc:
        raise _something_else(path) from exc
    if magic_number != _MAGIC_NUMBER:
        raise _something_else(path)
    try:
        if read_pickle(path, file, {}) != _PROTOCOL_VERSION:
            raise ValueError("an unknown version of the older format")
        read_pickle(path, file, {})  # byte order and type sizes; elements are always little-endian
        value = read_pickle(path, file, storages)
        keys = read_pickle(path, file, {})
        spans = _spans_in_order(file, keys, storages)
    except (ValueError, TypeError, KeyError, struct.error, OSError) as exc:
        raise damaged(path) from exc
    return TorchFile(path=path, value=value, spans=spans, big_endian=False, file=file)


def _something_else(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: {EXPECTED}, got a file of another kind",
        hint="give the path of a file that torch.save or safetensors wrote",
    )


def _spans_in_order(file: BufferedReader, keys: Any, storages: Mapping[str, StorageRef]) -> dict[str, tuple[int, int]]:
    """Return `TorchFile.spans` of the storages that follow the pickles of an older file, in the order of ``keys``."""
    import torch

    size_bytes = os.fstat(file.fileno()).st_size
    spans: dict[str, tuple[int, int]] = {}
    for key in keys:
        ref = storages[key]
        (numel,) = struct.unpack("<q", file.read(8))
        byte_count = numel * getattr(torch, ref.dtype).itemsize
        spans[key] = (file.tell(), byte_count)
        if numel != ref.numel or file.seek(byte_count, os.SEEK_CUR) > size_bytes:
            raise ValueError(f"storage {key} has {numel} numbers, expected {ref.numel}, or is cut off")
    return spans
