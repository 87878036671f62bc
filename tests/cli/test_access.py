"""Key, certificates and address of a service, from options and from variables of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_cli.runners import default_urls
from tests.cli.terminal import gmmvit_here, refused
from tests.conftest import GOLDEN

FILE = GOLDEN / "manifest.json"


@pytest.mark.parametrize(
    ("variable", "runners", "expected"),
    [
        ("", ["triton-http"], []),
        ("https://host", ["onnxruntime", "triton-http"], ["https://host"]),
        ("grpcs://host:1", ["triton-grpc"], ["grpcs://host:1"]),
        ("https://host", ["triton-grpc"], []),
    ],
)
def test_the_address_of_the_variable(
    variable: str, runners: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GMMVIT_URL", variable)
    assert default_urls(runners) == expected


@pytest.mark.parametrize("option", ["--key-file", "--ca"])
@pytest.mark.parametrize("by_variable", [False, True], ids=["option", "variable"])
def test_a_file_that_does_not_exist(
    option: str, by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = {"--key-file": "GMMVIT_KEY_FILE", "--ca": "GMMVIT_CA"}[option]
    path = str(tmp_path / "nowhere")
    if by_variable:
        monkeypatch.setenv(variable, path)
    answer = gmmvit_here("classify", FILE, *(() if by_variable else (option, path)))
    _, hint = refused(answer, f"{option} {path}: no such file")
    assert variable in hint
