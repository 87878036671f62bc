"""Choose the cases that ``make test`` and ``make test-fast`` run of a test with many networks, values or mistakes.

Of a test with the marker ``cases``, ``make test`` runs a case if it brings a family, a kind of mask or another value
that no earlier case had; of a test with several parameters, if it brings a new combination, such as a family in a
precision. ``@pytest.mark.cases("family")`` looks at the parameter ``family`` alone.
Of a test with the marker ``first(n)``, it runs the first n cases. The other cases get the marker ``rest``, and
``make test-rest`` runs them. ``make test-fast`` runs the first case of a test; the others get the marker ``further``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from itertools import product
from typing import Any

import pytest

from tests.golden_files import MANIFEST

__all__ = ["mark_further_cases"]


def mark_further_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that ``make test`` or ``make test-fast`` leaves out.

    A case that is skipped on this machine is not marked, and does not count as the first.
    """
    seen = Counter[str]()
    shown: dict[str, set[tuple[Hashable, ...]]] = defaultdict(set)
    for item in items:
        if any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif")):
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > 1:
            item.add_marker(pytest.mark.further)
        if (first := item.get_closest_marker("first")) and seen[test] > first.args[0]:
            item.add_marker(pytest.mark.rest)
        if cases := item.get_closest_marker("cases"):
            params: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
            new = set(product(*(shown_by(params[name]) for name in cases.args or params)))
            if new <= shown[test]:
                item.add_marker(pytest.mark.rest)
            shown[test] |= new


def shown_by(value: Any) -> set[Hashable]:
    """Return the family and the mask of a golden checkpoint or a small model, the family of a planted mistake, or the
    value itself.
    """
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if name in MANIFEST:
        return {("family", MANIFEST[name]["family"]), ("mask", MANIFEST[name]["mask"])}
    if hasattr(value, "variant"):
        return {("family", value.family.name), ("mask", value.variant or value.kind)}
    if hasattr(value, "family"):
        return {("family", value.family)}
    return {value if isinstance(value, Hashable) else repr(value)}
