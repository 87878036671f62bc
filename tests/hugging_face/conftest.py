"""The folders that transformers writes, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hugging_face.folders import saved


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: name of a test folder → the folder, written on first use."""
    root = tmp_path_factory.mktemp("hugging_face")

    def folder(name: str) -> Path:
        return root / name if (root / name).exists() else saved(name, root / name)

    return folder
