"""Imports load no unused modules, and the listed public names exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gmmvit_deploy
from gmmvit_deploy import errors

LIGHT = (
    "gmmvit_deploy.images.data",
    "gmmvit_deploy.runtimes.engines",
    "gmmvit_deploy.graphs",
    "gmmvit_deploy.measure",
    "gmmvit_deploy.runtimes.kernels",
    "gmmvit_deploy.runtimes.runners",
    "gmmvit_deploy.runtimes.programs",
    "gmmvit_deploy.serving",
    "gmmvit_deploy.models.sources",
    "gmmvit_deploy.bundle.variants",
    "gmmvit_deploy.bundle.artifacts",
    "gmmvit_deploy.bundle.golden",
    "gmmvit_deploy.files.writing",
    "gmmvit_deploy.inference",
)
HEAVY = {"torch", "onnx", "onnxruntime", "tritonclient", "PIL", "tensorrt", "tensorrt_rtx"}
IN_THE_SERVER = ("gmmvit_deploy.serving.triton_models.",)
"""Modules that run inside Triton; only Triton has the modules that they import."""


PROGRAMS = ("_launch", ".front._app")
"""Modules that run in a process of their own, and import what it needs at its start."""


def modules(package: str) -> list[str]:
    root = importlib.import_module(package)
    below = (info.name for info in pkgutil.walk_packages(getattr(root, "__path__", []), f"{package}."))
    return [package, *(name for name in below if not name.startswith(IN_THE_SERVER))]


RECORDS = "gmmvit_deploy.models.families"  # with the record of each family, but not its module and passes


def test_light_rooms_import_no_torch() -> None:
    names = [RECORDS] + [name for package in LIGHT for name in modules(package) if not name.endswith(PROGRAMS)]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    code += f"print(sorted({HEAVY} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


@pytest.mark.integration
def test_importing_openvino_reports_nothing_over_the_network() -> None:
    code = """
    import sys, time
    seen = []
    sys.addaudithook(lambda event, _: event in ("socket.getaddrinfo", "os.fork") and seen.append(event))
    from gmmvit_deploy.extras import require
    require("openvino", package="openvino", extra="openvino")
    time.sleep(1)  # a report would be sent by a process of its own
    print(seen)"""
    answer = subprocess.run([sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_the_face_of_the_library_is_there_and_typed() -> None:
    stub = Path(gmmvit_deploy.__path__[0]).joinpath("__init__.pyi").read_text()
    for name, module in gmmvit_deploy._FACE.items():
        assert getattr(gmmvit_deploy, name) is getattr(importlib.import_module(f"gmmvit_deploy.{module}"), name)
        assert f"from gmmvit_deploy.{module} import {name} as {name}" in stub


def test_every_error_is_in_the_tree_that_its_file_draws() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if kind.__module__ == errors.__name__:
            assert issubclass(kind, errors.GmmvitError)
            assert f"{name} " in drawn or f"{name}\n" in drawn, name
            if kind is not errors.MissingDependencyError:
                assert kind("what went wrong").hint  # what to do is never left out


def test_every_public_name_is_listed_and_shows_an_example() -> None:
    code = "import sys, gmmvit_deploy\nprint({'torch', 'numpy'} & {*sys.modules}, *gmmvit_deploy.__all__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["set()", *gmmvit_deploy.__all__]
    for name in gmmvit_deploy.__all__:
        text = inspect.getdoc(getattr(gmmvit_deploy, name)) or ""
        example = re.search(r"Example: ``(.+?)``", text) or re.search(r"^ {4}(gmmvit_deploy\..+)$", text, re.MULTILINE)
        assert example is not None, name
        assert f"{name}(" in example[1]
        compile(example[1].replace("…", "..."), name, "eval")


def test_a_traceback_names_the_arguments_of_python() -> None:
    error = errors.InputError(
        "wrong", hint="type --set heads=3, or add --input tensor; type gmmvit export A -o B --force"
    )
    assert error.__notes__ == ["hint: give heads=3, or add input_kind tensor; type gmmvit export A -o B --force"]
