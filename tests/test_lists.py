"""The lists of commands and functions, which a reader of the Markdown files finds, are those of the program."""

from __future__ import annotations

import pytest

from docs.lists import PAGES, written


@pytest.mark.parametrize("page", ["commands.md", "python_api.md"])
def test_the_list_is_current(page: str) -> None:
    current = written(page)
    assert current.count("\n- `") > 15
    assert (PAGES / page).read_text(encoding="utf-8") == current, "type python docs/lists.py --write"
