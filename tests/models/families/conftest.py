from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.families.small_models import SmallExports


@pytest.fixture(scope="session")
def small_exports(shared: Path) -> SmallExports:
    """The small models of every family, exported when they are first asked for."""
    return SmallExports(shared)
