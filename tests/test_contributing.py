"""CONTRIBUTING.md names what is there."""

from __future__ import annotations

import re

from tests.repositories import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE))
    assert {"hooks", "release", "test-fast"} <= named <= targets, named - targets


def test_folders_and_files_exist() -> None:
    rows = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        first, *others = re.findall(r"`([^`]+)`", row)
        parent = (ROOT / first).parent  # `gmmvit_deploy/parity/`, `bench/`: the second is beside the first
        for path in (ROOT / first, *(parent / name for name in others)):
            assert path.is_dir(), f"{path} in the row {row!r}"
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / link).is_file(), link
