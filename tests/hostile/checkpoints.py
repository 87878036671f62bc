"""Hostile checkpoint files.  Each function writes a file into a folder, and returns its path."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import socket
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gmmvit_deploy.demo.models import save_checkpoint
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec
from tests.hostile.case import Case

State = dict[str, Any]
CANARY = "canary"
"""The file that code in a checkpoint tries to write, in the current folder; it must not appear."""


def small_checkpoint(path: Path) -> Path:
    """Write the checkpoint of a ViT with a Gaussian mixture mask, 8×8 images and 3 classes."""
    torch.manual_seed(0)
    spec = ViTSpec(
        image_size=8,
        channels=3,
        classes=3,
        patch_size=2,
        dim=16,
        depth=1,
        heads=2,
        head_dim=8,
        mlp_dim=32,
        class_token=False,
        mask=MaskSpec(kind="gmm", kernels=2),
    )
    save_checkpoint(model_from_spec(spec).eval(), path, epoch=0)
    return path


# Pickles by hand: text of opcodes, so that each line shows how code would be called.


def _pickled(body: bytes, folder: Path) -> Path:
    """A zip file of `torch.save` with these opcodes as its pickle."""
    path = folder / "checkpoint.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", body)
        archive.writestr("archive/version", "3\n")
    return path


def _bare(body: bytes, folder: Path) -> Path:
    path = folder / "checkpoint.pth"
    path.write_bytes(body)
    return path


def _older(body: bytes, folder: Path) -> Path:
    """A file of `torch.save` before 1.6, with these opcodes in place of its second pickle."""
    return _bare(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + body, folder)


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


WRITE = _text(f"open('{CANARY}','w').close()")
SHELL = _text(f"touch {CANARY}")
OPCODES: dict[str, bytes] = {
    "code: os.system by REDUCE": b"\x80\x02cos\nsystem\n" + SHELL + b"\x85R.",
    "code: eval by REDUCE": b"\x80\x02cbuiltins\neval\n" + WRITE + b"\x85R.",
    "code: Python 2's __builtin__": b"\x80\x02c__builtin__\nexec\n" + WRITE + b"\x85R.",
    "code: INST of protocol 0": b"(S'touch canary'\nios\nsystem\n.",
    "code: OBJ": b"(cos\nsystem\nS'touch canary'\no.",
    "code: NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + SHELL + b"\x85\x81.",
    "code: NEWOBJ_EX": b"\x80\x04csubprocess\nPopen\n)}" + _text("args") + SHELL + b"s\x92.",
    "code: STACK_GLOBAL": b"\x80\x04" + _text("os") + _text("system") + b"\x93" + SHELL + b"\x85R.",
    "code: dotted name through an allowed module": b"\x80\x04ctorch\nserialization.os.system\n" + SHELL + b"\x85R.",
    "code: attribute of an allowed function": b"\x80\x04"
    + _text("torch._utils")
    + _text("_rebuild_tensor_v2.__globals__")
    + b"\x93.",
    "code: extension registry": b"\x80\x02\x82\x01.",
    "code: persistent id that names a function": b"\x80\x02("
    + _text("storage")
    + b"cos\nsystem\n"
    + _text("0")
    + _text("cpu")
    + b"K\x01tQ.",
    "code: BUILD of another __class__": b"\x80\x02ccollections\nOrderedDict\n)R}"
    + _text("__class__")
    + b"cos\n_Environ\nsb.",
    "code: BUILD with slots": b"\x80\x02ccollections\nOrderedDict\n)RN}" + _text("update") + b"cos\nsystem\ns\x86b.",
    "code: a function as a value": b"\x80\x02}" + _text("lr_lambda") + b"cos\ngetcwd\ns.",
    "code: functools.partial": b"\x80\x02cfunctools\npartial\ncos\nsystem\n\x85R" + SHELL + b"\x85R.",
    "code: operator.methodcaller": b"\x80\x02coperator\nmethodcaller\n" + _text("system") + SHELL + b"\x86Rcos\n\nR.",
    "code: marshal of a code object": b"\x80\x02cmarshal\nloads\nC\x01N\x85R.",
    "code: torch.load of another file": b"\x80\x02ctorch\nload\n" + _text("/etc/passwd") + b"\x85R.",
    "code: numpy object array": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R.",
    "pickle: no opcode STOP": b"\x80\x02}",
    "pickle: pop of an empty stack": b"\x80\x020.",
    "pickle: memo that was never set": b"\x80\x02h\x07.",
    "pickle: unknown opcode": b"\x80\x02\xfe.",
    "pickle: protocol 200": b"\x80\xc8}.",
    "pickle: frame of 2**62 bytes": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",
    "pickle: text of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.",
    "pickle: number of 100 million digits": b"\x80\x02\x8b" + struct.pack("<i", 10**8) + b"\x01.",
    "pickle: number of negative length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"\x01.",
    "pickle: lists in lists, 100,000 levels": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "pickle: list that contains itself": b"\x80\x02]q\x00h\x00a.",
    "pickle: dictionary with itself as its key": b"\x80\x02}q\x00h\x00K\x01s.",
    "pickle: shared lists that stand for billions of values": b"\x80\x02]q\x00(K\x01K\x01e"
    + b"".join(b"]q" + bytes([n]) + b"(h" + bytes([n - 1]) + b"h" + bytes([n - 1]) + b"e" for n in range(1, 40))
    + b".",
    "pickle: 6 million opcodes": b"\x80\x02]" + b"N0" * 3_000_000 + b".",
    "pickle: only a number": b"\x80\x02K\x05.",
    "pickle: marks without values": b"\x80\x02" + b"(" * 1_000_000 + b".",
}


# Files that `torch.save` wrote, changed.


def _saved(change: Callable[[State], Any], folder: Path) -> Path:
    path = small_checkpoint(folder / "checkpoint.pth")
    content = torch.load(path, weights_only=True)
    result = change(content["model_state_dict"])
    torch.save(content if result is None else result, path)
    return path


def _first(state: State) -> str:
    return next(name for name, tensor in state.items() if tensor.ndim == 2 and tensor.numel() > 100)


def _set(value: Callable[[torch.Tensor], Any]) -> Callable[[State], Any]:
    def change(state: State) -> None:
        name = _first(state)
        state[name] = value(state[name])

    return change


def _nested(state: State) -> Any:
    for _ in range(150):
        state = {"model": state}
    return state


def _without_first(state: State) -> None:
    del state[_first(state)]


def _add(name: str, value: Any) -> Callable[[State], None]:
    return lambda state: state.update({name: value})


STATES: dict[str, Callable[[State], Any]] = {
    "weights: NaN": _set(lambda tensor: tensor * float("nan")),
    "weights: infinite": _set(lambda tensor: tensor + float("inf")),
    "weights: complex numbers": _set(lambda tensor: tensor.to(torch.complex64)),
    "weights: whole numbers": _set(lambda tensor: tensor.to(torch.int64)),
    "weights: transposed": _set(lambda tensor: tensor.T.contiguous()),
    "weights: no elements": _set(lambda tensor: tensor[:0]),
    "weights: a text in place of a tensor": _set(lambda tensor: "weights"),
    "weights: a sparse tensor": _set(lambda tensor: tensor.to_sparse()),
    "weights: a quantised tensor": _set(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
    "weights: expanded from a single number to 10**12": _set(lambda t: torch.zeros(1).expand(10**6, 10**6)),
    "weights: subnormal numbers": _set(lambda tensor: tensor * 0 + 1e-45),
    "weights: a missing tensor": _without_first,
    "weights: names that are paths": _add("../../../etc/passwd", torch.zeros(1)),
    "weights: names with terminal escapes": _add("\x1b[2J\x1b]0;title\x07", torch.zeros(1)),
    "weights: a name of a megabyte": _add("a" * 1_000_000, torch.zeros(1)),
    "weights: 20,000 unknown tensors": lambda state: state.update(
        {f"extra.{n}": torch.zeros(1) for n in range(20_000)}
    ),
    "weights: a name that is a number": lambda state: state.update({7: torch.zeros(1)}),
    "weights: wrapped 150 times": _nested,
    "weights: two sets of weights": lambda state: {"model": state, "net": {k: v + 1 for k, v in state.items()}},
    "weights: an empty dictionary": lambda state: {},
    "weights: a list of tensors": lambda state: list(state.values()),
}


# The zip archive around the pickle.


def _rezipped(change: Callable[[zipfile.ZipFile, dict[str, bytes]], None], folder: Path) -> Path:
    path = small_checkpoint(folder / "checkpoint.pth")
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        change(archive, records)
    return path


def _write(archive: zipfile.ZipFile, records: dict[str, bytes], **options: Any) -> None:
    for name, content in records.items():
        archive.writestr(name, content, **options)


def _bomb(archive: zipfile.ZipFile, records: dict[str, bytes]) -> None:
    name = next(name for name in records if name.endswith("data.pkl"))
    with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True):
        pass
    archive.writestr(name, bytes(500_000_000), compress_type=zipfile.ZIP_DEFLATED)


def _renamed(prefix: str) -> Callable[[zipfile.ZipFile, dict[str, bytes]], None]:
    return lambda archive, records: _write(archive, {f"{prefix}{name}": data for name, data in records.items()})


def _twice(archive: zipfile.ZipFile, records: dict[str, bytes]) -> None:
    _write(archive, records)
    name = next(name for name in records if name.endswith("data.pkl"))
    archive.writestr(name, OPCODES["code: os.system by REDUCE"])


def _link(archive: zipfile.ZipFile, records: dict[str, bytes]) -> None:
    name = next(name for name in records if name.endswith("data/0"))
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    _write(archive, {other: data for other, data in records.items() if other != name})
    archive.writestr(info, "/etc/passwd")


def _short(archive: zipfile.ZipFile, records: dict[str, bytes]) -> None:
    _write(archive, {name: data[:4] if "/data/" in name else data for name, data in records.items()})


ARCHIVES: dict[str, Callable[[zipfile.ZipFile, dict[str, bytes]], None]] = {
    "archive: pickle of 500 MB in 500 kB": _bomb,
    "archive: compressed storages": lambda archive, records: _write(archive, records, compress_type=8),
    "archive: names that leave the folder": _renamed("../../"),
    "archive: absolute names": _renamed("/etc/"),
    "archive: two pickles of the same name": _twice,
    "archive: a symbolic link as a storage": _link,
    "archive: storages shorter than their tensors": _short,
    "archive: no storages": lambda a, records: _write(a, {n: d for n, d in records.items() if "/data/" not in n}),
    "archive: TorchScript": lambda a, records: _write(a, {**records, "checkpoint/code/__torch__.py": b"import os"}),
    "archive: empty": lambda archive, records: None,
}


def _bytes_changed(change: Callable[[bytes], bytes], folder: Path) -> Path:
    path = small_checkpoint(folder / "checkpoint.pth")
    path.write_bytes(change(path.read_bytes()))
    return path


def _storage_changed(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        storages = [record for record in archive.infolist() if "/data/" in record.filename]
    largest = max(storages, key=lambda record: record.file_size)
    at = largest.header_offset + largest.file_size // 2  # behind the header of the record
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "bytes: cut in the middle": lambda data: data[: len(data) // 2],
    "bytes: a storage with another checksum": _storage_changed,
    "bytes: directory of the archive that states 65,535 entries": lambda d: (
        d[:-22] + d[-22:].replace(d[-14:-10], b"\xff\xff\xff\xff")
    ),
    "bytes: encrypted entries": lambda data: re.sub(
        rb"(PK\x01\x02.{4})(.)", lambda match: match[1] + bytes([match[2][0] | 1]), data, flags=re.DOTALL
    ),
    "bytes: a program before the archive": lambda data: b"\x7fELF" + bytes(60) + data,
}


# safetensors


def _safetensors(header: Any, data: bytes, folder: Path, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "checkpoint.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SAFETENSORS: dict[str, Callable[[Path], Path]] = {
    "safetensors: header of 2**63 bytes": partial(_safetensors, {}, b"", length=2**63),
    "safetensors: header nested 100,000 times": partial(_safetensors, b"[" * 100_000 + b"]" * 100_000, b""),
    "safetensors: header that is no UTF-8": partial(_safetensors, b'{"\xff\xfe": 1}', b""),
    "safetensors: header that is a list": partial(_safetensors, [1, 2], b""),
    "safetensors: tensor outside the file": partial(_safetensors, _entry([4], [10**6, 10**6 + 16]), bytes(16)),
    "safetensors: tensor that ends before its begin": partial(_safetensors, _entry([4], [16, 0]), bytes(16)),
    "safetensors: shape below 0": partial(_safetensors, _entry([-4], [0, 16]), bytes(16)),
    "safetensors: shape whose product overflows": partial(_safetensors, _entry([2**33, 2**33], [0, 16]), bytes(16)),
    "safetensors: unknown type": partial(_safetensors, _entry([4], [0, 16], "F7"), bytes(16)),
    "safetensors: tensors that overlap": partial(
        _safetensors, {**_entry([4], [0, 16]), "v": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, bytes(24)
    ),
    "safetensors: bytes of no tensor": partial(_safetensors, _entry([1], [0, 4]), bytes(4000)),
    "safetensors: the same name twice": partial(
        _safetensors,
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "safetensors: metadata that is a number": partial(
        _safetensors, {"__metadata__": 7, **_entry([1], [0, 4])}, bytes(4)
    ),
}


# Other files


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


def _socket(folder: Path) -> Path:
    here = Path.cwd()
    os.chdir(folder)  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("s.pth")
    finally:
        os.chdir(here)
    return folder / "s.pth"


def _linked(target: str, folder: Path) -> Path:
    (folder / "checkpoint.pth").symlink_to(target)
    return folder / "checkpoint.pth"


def _sparse(folder: Path) -> Path:
    path = small_checkpoint(folder / "checkpoint.pth")
    os.truncate(path, 2**40)
    return path


def _npz(folder: Path) -> Path:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00")
    return _bare(buffer.getvalue(), folder)


OTHERS: dict[str, Callable[[Path], Path]] = {
    "file: empty": partial(_bare, b""),
    "file: text": partial(_bare, b"these are no weights\n" * 100),
    "file: HTML of a download page": partial(_bare, b"<!DOCTYPE html><html>Sign in</html>"),
    "file: HDF5": partial(_bare, b"\x89HDF\r\n\x1a\n" + bytes(500)),
    "file: gzip": partial(_bare, b"\x1f\x8b\x08\x00" + bytes(100)),
    "file: pointer of Git LFS": partial(_bare, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "file: arrays of numpy": _npz,
    "file: code in the second pickle of the older format": partial(_older, OPCODES["code: os.system by REDUCE"]),
    "file: code in a bare pickle": partial(_bare, OPCODES["code: eval by REDUCE"]),
    "file: a pipe that nobody writes": _fifo,
    "file: a socket": _socket,
    "file: a device without end": partial(_linked, "/dev/zero"),
    "file: a symbolic link to itself": partial(_linked, "checkpoint.pth"),
    "file: a folder": lambda folder: folder,
    "file: a sparse file of a terabyte": _sparse,
}


_VALID = {
    "weights: subnormal numbers",
    "archive: TorchScript",
    "bytes: directory of the archive that states 65,535 entries",
    "bytes: encrypted entries",
}
"""Checkpoints that are unusual, but sound: Python reads the directory of an archive by its size. PyTorch reads stored
entries whatever their flags are, and never reads code beside the weights."""

CHECKPOINTS: tuple[Case, ...] = tuple(
    Case(kind="checkpoint", name=name, make=partial(write, body), may_be_answered=name in _VALID)
    for write, table in (
        (_pickled, OPCODES),
        (_saved, STATES),
        (_rezipped, ARCHIVES),
        (_bytes_changed, BYTES),
        (lambda make, folder: make(folder), SAFETENSORS),
        (lambda make, folder: make(folder), OTHERS),
    )
    for name, body in table.items()  # type: ignore[attr-defined]
)
"""The hostile checkpoints; ``make(folder)`` writes the file."""
