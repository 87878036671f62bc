"""docs/pages/running_it.md names tests that exist, and times that are those of the program."""

from __future__ import annotations

import re

from gmmvit_deploy.serving.front.process import _EXIT_TIMEOUT_S
from gmmvit_deploy.serving.gateway.haproxy import _END_S
from gmmvit_deploy.serving.gateway.service import _STOP_S
from gmmvit_deploy.serving.server import _EXIT_S, ServerOptions
from tests.documented import ROOT, table

PAGE = "running_it.md"


def test_systemd_waits_longer_than_the_service_needs_to_end() -> None:
    """Rollout, gateway, two fronts and two servers end one after the other."""
    text = (ROOT / "docs/pages" / PAGE).read_text(encoding="utf-8")
    longest = 30 + (_STOP_S + 3 * _END_S) + 2 * (_EXIT_TIMEOUT_S + ServerOptions().exit_timeout_s + _EXIT_S)
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > longest


def test_every_row_of_the_threats_names_tests_that_exist() -> None:
    rows = table(PAGE, "threat")
    assert len(rows) > 10
    for row in rows:
        assert len(row) == 4, row
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[3])
        assert named, row
        for file, test in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert file.startswith("benchmarks/") or re.search(rf"def {test}\(", text), f"{file}::{test}"
