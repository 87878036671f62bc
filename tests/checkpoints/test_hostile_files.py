"""Files made to run code, exhaust memory or mislead: each is refused with a clear error, and nothing of it runs."""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gmmvit_deploy.checkpoints import _pickled as pickled
from gmmvit_deploy.checkpoints import _torch_file as torch_file
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.reading import read_tensors
from gmmvit_deploy.errors import CheckpointError
from tests.hostile.case import Case
from tests.hostile.checkpoints import CANARY, CHECKPOINTS

HEAVY = ("500 MB", "6 million", "20,000", "a pipe", "without end", "terabyte")
"""Words in the names of files that take seconds, gigabytes or a limit on time; benchmarks/hostile.py runs them too."""
WEIGHTS = {"a": torch.zeros(2)}
OLD = pytest.mark.parametrize("old", [False, True], ids=["zip", "before torch 1.6"])


class Calls:
    """A pickle of this object calls a function when it is loaded carelessly."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Ordinary:
    """An object of a class that the reader does not know."""


def saved(tmp_path: Path, content: Any, *, old: bool = False) -> Path:
    path = tmp_path / "file.pth"
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


def zipped(tmp_path: Path, data: bytes, **storages: bytes) -> Path:
    """Write a file in the zip format around a pickle made by hand."""
    path = tmp_path / "file.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", data)
        for key, content in storages.items():
            archive.writestr(f"x/data/{key.removeprefix('_')}", content)
    return path


@pytest.mark.parametrize(
    "case", [case for case in CHECKPOINTS if not any(word in case.name for word in HEAVY)], ids=lambda case: case.name
)
def test_a_hostile_checkpoint_is_refused(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    path = case.make(tmp_path / "folder")
    if case.may_be_answered:
        with contextlib.suppress(CheckpointError):
            load_checkpoint(path)
    else:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path)
        assert str(path) in str(caught.value)
    assert not Path(CANARY).exists()


VALUES: dict[str, tuple[Any, str]] = {
    "function": (os.system, "system"),
    "system": (Calls(os.system, "touch ran"), "system"),
    "eval": (Calls(eval, "1"), "eval"),
    "getattr": (Calls(getattr, "", "join"), "getattr"),
    "object": (Ordinary(), "Ordinary"),
    "path": (Path("somewhere"), "Path"),
    "array": (np.zeros(3), "numpy"),
    "date": (datetime.date(2024, 1, 2), "datetime.date"),
    "module": (torch.nn.Linear(2, 2), "Linear"),
    "class": (torch.nn.Parameter, "torch.nn.parameter.Parameter"),
    "partial": (functools.partial(print, 1), "functools.partial"),
    "frozen": (frozenset({Ordinary}), "set"),
    "key": ({torch.float32: 1, Ordinary: 2}, "dict"),
    "default": (collections.defaultdict(list, a=[1]), "collections.defaultdict"),
}
"""Name of a case → (value, a part of the name of its class or function)."""


@OLD
@pytest.mark.parametrize("where", ["args", "extra", "list"])
@pytest.mark.parametrize("case", VALUES)
def test_what_is_no_data_beside_the_weights_is_left_out(
    case: str, where: str, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = VALUES[case][0]
    content = {
        "model": WEIGHTS,
        "args": Namespace(lr=1.0, thing=value if where == "args" else 0),
        "extra": [{"deep": (value,)}] if where == "list" else value if where == "extra" else 0,
        "best": np.float64(0.93),
    }
    file = read_tensors(saved(tmp_path, content, old=old))
    assert file.tensors.keys() == {"a"}
    assert (file.record.args["lr"], file.record.entries["best"]) == (1.0, 0.93)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("case", VALUES)
def test_what_is_no_data_among_the_weights_is_refused_by_name(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value, name = VALUES[case]
    with pytest.raises(CheckpointError, match=r"no code of the file was run|are no tensors") as caught:
        read_tensors(saved(tmp_path, {"model": {**WEIGHTS, "x": value}}))
    assert name in str(caught.value)
    assert not (tmp_path / "ran").exists()


def args_of(tmp_path: Path, **values: Any) -> Any:
    return read_tensors(saved(tmp_path, {"model": WEIGHTS, "args": Namespace(**values)})).record.args


def _itself() -> Namespace:
    args = Namespace()
    args.itself = args
    return args


def _billions() -> list[Any]:
    value: list[Any] = []
    for _ in range(30):
        value = [value] * 10
    return value


@pytest.mark.parametrize("make", [_itself, _billions])
def test_values_without_end_are_left_out(make: Callable[[], Any], tmp_path: Path) -> None:
    assert args_of(tmp_path, size=np.int64(32), on=np.bool_(True), x=make()) == {"size": 32, "on": True}


NAMESPACE = b"cargparse\nNamespace\n"
DEEP = b"\x85" * 200_000
OPCODES = (
    *(b"", b"\x85.", b"\x87.", b"t.", b"R.", b"}}R.", b")\x81.", b"}b.", b"]}b.", b"Q.", b"K\x01Q.", b"q\x05."),
    *(
        b"}K\x01a.",
        b"]K\x01K\x02s.",
        b"}(K\x01u.",
        b"}]K\x01s.",
        NAMESPACE + b")\x81]b.",
        NAMESPACE + b"K\x01\x85\x81.",
    ),
    *(b"X\xff\xff\xff\x7fabc.", b"\x96\xff\xff\xff\xff\x00\x00\x00\x00abc.", b"r\xff\xff\xff\xff."),
    b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00base64\x86R.",
    *(b")\x85" + DEEP + b"}h\x00.", b"})" + DEEP + b"K\x01s.", NAMESPACE + DEEP + b"."),
)
"""Opcodes whose operands are missing, of another kind, too large or too deep."""


@pytest.mark.parametrize("opcodes", OPCODES, ids=lambda opcodes: opcodes[:24].hex())
def test_damaged_pickles(opcodes: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"file\.pth"):
        read_tensors(zipped(tmp_path, b"\x80\x05" + opcodes))


def tensor_pickle(*, numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """Return the pickle of {"a": tensor}, with any numbers."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, Storage):
                return ("storage", torch.FloatStorage, "0", "cpu", numel)
            return None

    made = BytesIO()
    arguments = (Storage(), offset, shape, stride, False, {})
    Pickler(made, protocol=2).dump({"a": Calls(torch._utils._rebuild_tensor_v2, *arguments)})
    return made.getvalue()


def test_a_tensor_written_by_hand(tmp_path: Path) -> None:
    """The refused ones below differ from this file in one number."""
    path = zipped(tmp_path, tensor_pickle(numel=4, shape=(2, 2), stride=(2, 1)), _0=bytes(16))
    assert read_tensors(path).tensors["a"].equal(torch.zeros(2, 2))


@pytest.mark.parametrize(
    "numbers",
    [
        {},  # the file has no storage
        {"numel": 5},
        {"numel": 2**40},
        {"numel": -4},
        {"shape": (2, 3)},
        {"shape": (2**40, 2**40), "stride": (0, 0)},
        {"shape": (0, 2**70)},
        {"shape": (2, -2)},
        {"shape": (2,)},
        {"shape": (1,) * 100, "stride": (1,) * 100},
        {"stride": (3, 1)},
        {"stride": (2, -1)},
        {"offset": 1},
        {"offset": 2**70},
        {"offset": -1},
        {"shape": [2, 2]},
        {"shape": (True, True)},
        {"numel": 4.0},
    ],
    ids=str,
)
def test_tensors_that_reach_outside_their_storage(numbers: dict[str, Any], tmp_path: Path) -> None:
    stored = {} if numbers == {} else {"_0": bytes(16)}
    data = tensor_pickle(**{"numel": 4, "shape": (2, 2), "stride": (2, 1), **numbers})
    with pytest.raises(CheckpointError, match=r"truncated or damaged|to be a dense tensor"):
        read_tensors(zipped(tmp_path, data, **stored))


@pytest.mark.parametrize(
    ("module", "limit", "allowed", "log", "message"),
    [
        (pickled, "_MAX_BYTES", 1000, "x" * 2000, "at most 1,000 bytes, got more"),
        (pickled, "_MAX_OPCODES", 1000, list(range(2000)), "at most 1,000 instructions, got more"),
        (torch_file, "_MAX_PICKLE_BYTES", 100, "x" * 200, "at most 100 bytes"),
    ],
)
def test_huge_pickles(
    module: Any, limit: str, allowed: int, log: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, allowed)
    with pytest.raises(CheckpointError, match=message):
        read_tensors(saved(tmp_path, {"model": WEIGHTS, "log": log}))


@OLD
def test_every_truncation_is_refused(old: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": WEIGHTS, "args": Namespace(lr=1.0)}, old=old)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"file\.pth"):
            read_tensors(path)


@OLD
def test_changed_bytes_never_raise_another_error(old: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": WEIGHTS, "args": Namespace(lr=1.0)}, old=old)
    data = path.read_bytes()
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            read_tensors(path)
        except CheckpointError:
            continue


def test_quantised_and_sparse_tensors_beside_the_weights_do_no_harm(tmp_path: Path) -> None:
    extra = {"sparse": torch.eye(3).to_sparse(), "repeated": torch.zeros(1).expand(10**12)}
    assert list(read_tensors(saved(tmp_path, {"model": WEIGHTS, "optimizer": extra})).tensors) == ["a"]
