"""A process may be started again five times in a minute."""

from __future__ import annotations

import pytest

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving import _restarts
from gmmvit_deploy.serving._restarts import Restarts


def test_the_sixth_end_in_a_minute_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(_restarts.time, "monotonic", lambda: now[0])
    restarts = Restarts("the HTTP endpoint")
    for _ in range(5):
        restarts.add("killed")
    now[0] = 59
    with pytest.raises(ServerError, match="the HTTP endpoint ended 6 times in a minute: killed"):
        restarts.add("killed")
    now[0] = 61
    restarts.add("killed")
    assert restarts.count == 6
