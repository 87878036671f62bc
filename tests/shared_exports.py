"""Let the processes of a test run share exported graphs: a module with the same settings is traced only once.

    key = SHA-256(pickle(module, example) ‖ options)  →  the exporter's graph, before any pass of ours

A test that patches code runs the exporter itself, and so does a module whose class cannot be pickled.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import NameFixPass

__all__ = ["FOLDER_VARIABLE", "shared_exports"]

FOLDER_VARIABLE = "GMMVIT_TESTS_EXPORTS"
"""Environment variable with the folder of shared exports: set by the first process of a run, read by the others."""


def key_of(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> str | None:
    """Return the hash of everything that the exported graph depends on, or None for a module that cannot be pickled."""
    content = io.BytesIO()
    try:
        torch.save((module, arguments), content)
    except (AttributeError, TypeError, RuntimeError, OSError):  # a class inside a function, a hook
        return None
    return hashlib.sha256(content.getvalue() + repr(sorted(options.items())).encode()).hexdigest()


@dataclass(frozen=True)
class StoredProgram:
    """What `onnx_from_model` reads of the program that ``torch.onnx.export`` returns."""

    model_proto: onnx.ModelProto

    @property
    def model(self) -> ir.Model:
        return ir.from_proto(self.model_proto)


@contextmanager
def shared_exports() -> Iterator[None]:
    """While the block runs, ``torch.onnx.export`` returns a graph that some process of this run exported before."""
    if FOLDER_VARIABLE not in os.environ:
        yield
        return
    folder, export = Path(os.environ[FOLDER_VARIABLE]), torch.onnx.export

    def shared(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], **options: Any) -> Any:
        key = key_of(module, arguments, options)
        if key is None:
            return export(module, arguments, **options)
        path = folder / f"{key}.onnx"
        if not path.exists():
            program = export(module, arguments, **options)
            if program is None:
                return None
            NameFixPass()(program.model)  # without optimisation, names can repeat, which is not valid in a file
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(program.model_proto.SerializeToString())
            Path(file.name).replace(path)
        return StoredProgram(onnx.ModelProto.FromString(path.read_bytes()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", shared)
        # The exporter parses its whole library of operators anew for each graph, a fifth of the time of an export.
        exporter: Any = importlib.import_module("torch.onnx._internal.exporter._registration")
        library = exporter.onnxscript_apis
        patch.setattr(library, "get_torchlib_ops", functools.partial(read_once, library.get_torchlib_ops))
        yield


@functools.cache
def read_once(read: Callable[[], Any]) -> Any:
    """Return what ``read()`` returns, and call it only at the first time."""
    return read()
