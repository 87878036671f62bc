"""Write a shared library that exports names and has no code.

TensorRT's Python bindings load three libraries on import, which are not available everywhere. Reading the names and
signatures of the bindings calls no function of the libraries, so symbols without code suffice.

ELF64, little-endian: header, two program headers (LOAD, DYNAMIC), then .hash, .dynsym, .dynstr, .dynamic.
Layout after the System V ABI, chapters 4 and 5.
"""

from __future__ import annotations

import struct
from pathlib import Path

_HEADER, _PROGRAM_HEADER, _SYMBOL, _ENTRY = 64, 56, 24, 16
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 0, 4, 5, 6, 10, 11, 14
_ABSOLUTE, _GLOBAL_FUNCTION = 0xFFF1, 0x12


def write_stub_library(path: Path, symbols: list[str]) -> None:
    """Write a library for x86-64, named as its file."""
    names = [path.name, *symbols]
    offsets, strings = [], b"\0"
    for name in names:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    count = len(symbols) + 1  # symbol 0 is undefined
    # one bucket, whose chain runs through all symbols
    chains = [0, *(index + 1 if index + 1 < count else 0 for index in range(1, count))]
    hashes = struct.pack(f"<3I{count}I", 1, count, 1 if symbols else 0, *chains)
    table = bytes(_SYMBOL) + b"".join(
        struct.pack("<IBBHQQ", offset, _GLOBAL_FUNCTION, 0, _ABSOLUTE, 1, 0) for offset in offsets[1:]
    )
    hash_at = _HEADER + 2 * _PROGRAM_HEADER
    table_at = _aligned(hash_at + len(hashes))
    strings_at = table_at + len(table)
    dynamic_at = _aligned(strings_at + len(strings))
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (_DT_SONAME, offsets[0]),
            (_DT_HASH, hash_at),
            (_DT_STRTAB, strings_at),
            (_DT_SYMTAB, table_at),
            (_DT_STRSZ, len(strings)),
            (_DT_SYMENT, _SYMBOL),
            (_DT_NULL, 0),
        )
    )
    size = dynamic_at + len(dynamic)
    header = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, 2, 0, 0, 0)
    programs = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 0x1000)
    programs += struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8)
    image = bytearray(size)
    for at, part in ((0, header + programs), (hash_at, hashes), (table_at, table), (strings_at, strings)):
        image[at : at + len(part)] = part
    image[dynamic_at:] = dynamic
    path.write_bytes(bytes(image))


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8
