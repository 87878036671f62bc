"""Run a gmmvit command in this process, and write how long each part of its work took and what was done twice.

    python timed_parts.py RESULT gmmvit-arguments...

The functions of the libraries are replaced by functions that take the time: the exporter of PyTorch, sessions of ONNX
Runtime, compilations of OpenVINO, digests, checks of graphs, compilers and servers. The time of a part does not contain
the parts that it calls, so that the parts add up to the whole. ``repeated`` counts the sessions and digests of the
same bytes, and the compilations of the same operators with the same shapes and settings. The script imports nothing of
this project, so that it measures any checkout.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Function = Callable[..., Any]
_DIGESTED_BYTES = 1 << 16
"""Smaller digests are left out: names, keys and options."""


class Parts:
    """The seconds of each part.  If several parts are open, the innermost gets the time."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.seen: Counter[tuple[str, str]] = Counter()
        self._open = ["rest"]
        self._since = time.perf_counter()

    def switch(self) -> None:
        """Give the time since the last switch to the innermost part."""
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(
        self, part: str, function: Callable[..., Any], key: Callable[..., str] | None = None
    ) -> Callable[..., Any]:
        """Return a function that takes the time of ``function``.  key: of its arguments, what must not occur twice."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._open.append(part)
            try:
                if key is not None:
                    self.seen[part, key(*args, **kwargs)] += 1
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._open.pop()

        return call

    def of_imports(self) -> str:
        """Return the part of the next import.

        The exporter imports modules of PyTorch and onnxscript that nothing else needs, when it runs.
        """
        return "imports by the exporter" if "exporter" in self._open else "imports"

    def replace(self, owner: Any, name: str, part: str, key: Function | None = None) -> None:
        """Replace a function of a module by a function that takes its time, unless it is replaced already."""
        if not hasattr(getattr(owner, name), "timed_part"):
            call = self.timed(part, getattr(owner, name), key)
            call.timed_part = part  # type: ignore[attr-defined]
            setattr(owner, name, call)


def digest_of(*data: Any) -> str:
    """Return a digest that is not counted itself."""
    digest = _SHA256()
    for each in data:
        digest.update(each if isinstance(each, bytes) else str(each).encode())
    return digest.hexdigest()


_SHA256 = hashlib.sha256


class _Digest:
    """`hashlib.sha256` with the time and the bytes of its updates."""

    def __init__(self, parts: Parts, data: bytes = b"") -> None:
        self._parts, self._digest, self._bytes, self._counted = parts, _SHA256(), 0, False
        self.update(data)

    def update(self, data: Any) -> None:
        self._bytes += memoryview(data).nbytes
        self._parts.timed("digests", self._digest.update)(data)

    def _count(self) -> None:
        if self._bytes >= _DIGESTED_BYTES and not self._counted:
            self._counted = True
            self._parts.seen["digests", self._digest.hexdigest()] += 1

    def hexdigest(self) -> str:
        self._count()
        return self._digest.hexdigest()

    def digest(self) -> bytes:
        self._count()
        return self._digest.digest()

    def copy(self) -> Any:
        return self._digest.copy()


def watch(parts: Parts) -> None:
    """Replace the functions of libraries once these are imported."""
    once: dict[str, Function] = {
        "onnxruntime": lambda module: setattr(module, "InferenceSession", _session(parts, module.InferenceSession)),
        "openvino": lambda module: setattr(module, "Core", _core(parts, module.Core)),
    }
    functions = (
        ("torch.onnx", "export", "exporter"),
        ("onnx.checker", "check_model", "graph checks"),
        ("onnx.shape_inference", "infer_shapes", "graph checks"),
    )
    depth = 0

    def watched(imported: Function) -> Function:
        def find(name: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return (parts.timed(parts.of_imports(), imported) if depth == 1 else imported)(name, *args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    replace_all()

        return find

    def replace_all() -> None:
        for each in [each for each in once if _complete(each)]:
            once.pop(each)(sys.modules[each])
        for each, function, part in functions:
            if _complete(each) and hasattr(sys.modules[each], function):
                parts.replace(sys.modules[each], function, part)

    builtins.__import__ = watched(builtins.__import__)
    importlib.import_module = watched(importlib.import_module)  # torch imports torch.onnx by this function
    hashlib.sha256 = lambda data=b"", **_: _Digest(parts, data)  # type: ignore[assignment]
    parts.replace(subprocess, "run", "other programs")


def _complete(name: str) -> bool:
    """Return whether a module has been imported, to its end."""
    return name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False)


def _content(model: Any) -> str:
    if isinstance(model, bytes):
        return digest_of(model)
    return digest_of(Path(model).read_bytes())


def _session(parts: Parts, kind: type) -> type:
    class Session(kind):  # type: ignore[misc]
        def __init__(self, model: Any, options: Any = None, *args: Any, **kwargs: Any) -> None:
            settings = "" if options is None else f"{options.intra_op_num_threads} {options.graph_optimization_level}"
            start = parts.timed(
                "sessions of ONNX Runtime", super().__init__, lambda *_, **__: digest_of(_content(model), settings)
            )
            start(model, options, *args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            return parts.timed("inference", super().run)(*args, **kwargs)

    return Session


def _core(parts: Parts, kind: type) -> type:
    class Core(kind):  # type: ignore[misc]
        def compile_model(self, *args: Any, **kwargs: Any) -> Any:
            return parts.timed("compilations of OpenVINO", super().compile_model, _compiled)(*args, **kwargs)

        def read_model(self, *args: Any, **kwargs: Any) -> Any:
            return parts.timed("graphs read by OpenVINO", super().read_model, lambda *a, **k: _read(a))(*args, **kwargs)

    return Core


def _compiled(model: Any, *settings: Any, **more: Any) -> str:
    """Return a digest of a model's operators with their shapes, and of the settings; of a file, its bytes."""
    if not hasattr(model, "get_ordered_ops"):
        return digest_of(_content(model), settings, more)
    operators = [f"{op.get_type_name()} {op.get_friendly_name()} {op.outputs()}" for op in model.get_ordered_ops()]
    return digest_of(*operators, settings, more)


def _read(args: tuple[Any, ...]) -> str:
    return _content(args[0])


def main() -> None:
    result, *arguments = sys.argv[1:]
    parts = Parts()
    watch(parts)
    sys.argv = ["gmmvit", *arguments]
    status: Any = 0
    try:
        from gmmvit_cli.main import main as run

        run()
    except SystemExit as exc:
        status = exc.code
    parts.switch()
    repeated = {f"{part} {key[:12]}": count for (part, key), count in parts.seen.items() if count > 1}
    counts = Counter(part for part, _ in parts.seen)
    Path(result).write_text(
        json.dumps({"status": status, "parts": parts.seconds, "counts": counts, "repeated": repeated}, indent=1)
    )


if __name__ == "__main__":
    main()
