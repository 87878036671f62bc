"""The real LoadGen, driving programs whose times and answers are known."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gmmvit_deploy.measure.load import ScenarioName, Work, drive

INPUTS = np.arange(40, dtype=np.float32).reshape(40, 1)


def doubled(batch: NDArray[Any]) -> NDArray[Any]:
    return np.repeat(2 * batch, 3, axis=1)


def slow(batch: NDArray[Any]) -> NDArray[Any]:
    time.sleep(0.005)
    return doubled(batch)


@pytest.mark.first(2)
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(
    ("scenario", "batch", "queries", "samples"),
    [("SingleStream", 1, 70, 70), ("MultiStream", 4, 30, 120), ("Offline", 8, 100, 100), ("Server", 8, 70, 70)],
)
def test_every_sample_is_answered_once(
    scenario: ScenarioName, batch: int, queries: int, samples: int, in_thread: bool
) -> None:
    work = Work(scenario=scenario, inputs=INPUTS, queries=queries, batch=batch, rate=2000, in_thread=in_thread)
    sizes: list[int] = []
    run = drive(lambda inputs: sizes.append(len(inputs)) or doubled(inputs), work)
    assert scenario == "Server" or set(sizes) <= {batch, samples % batch}
    assert run.outputs.shape == (samples, 3)
    np.testing.assert_array_equal(run.outputs[:, 0], 2 * run.indices)
    assert len(run.latencies_ms) == (samples if scenario == "Offline" else queries)
    assert (run.latencies_ms > 0).all()
    assert run.complaints == ()
    assert sorted(run.indices) == sorted(drive(doubled, work).indices)  # every runner gets the same samples


def test_latency_of_a_known_program() -> None:
    """A query is sent when the query before it was answered, so all latencies fit into the time of the run."""
    began = time.monotonic()
    run = drive(slow, Work(scenario="SingleStream", inputs=INPUTS, queries=20))
    assert run.latencies_ms.min() >= 5
    assert run.latencies_ms.sum() <= 1e3 * (time.monotonic() - began)


def test_latency_counts_from_the_scheduled_time() -> None:
    """With 5 ms a query and 1000 arrivals a second in sequence, the last queries have waited for all before them."""
    run = drive(slow, Work(scenario="Server", inputs=INPUTS, queries=100, batch=1, rate=1000))
    assert run.latencies_ms.max() > 200
    assert run.samples_per_second < 210


def test_a_server_may_answer_several_at_once() -> None:
    lock, under_way, largest, together = threading.Lock(), [0], [0], threading.Event()

    def counted(batch: NDArray[Any]) -> NDArray[Any]:
        """Wait for the first three calls to be under way together, and be slow enough for a fourth."""
        with lock:
            under_way[0] += 1
            largest[0] = max(largest[0], under_way[0])
            if largest[0] == 3:
                together.set()
        assert together.wait(60)
        answer = slow(batch)
        with lock:
            under_way[0] -= 1
        return answer

    drive(counted, Work(scenario="Offline", inputs=INPUTS, queries=64, batch=4, callers=3))
    assert largest[0] == 3


@pytest.mark.parametrize("scenario", ["SingleStream", "Offline", "Server"])
def test_a_program_that_fails_ends_the_run(scenario: ScenarioName) -> None:
    def failing(batch: NDArray[Any]) -> NDArray[Any]:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        drive(failing, Work(scenario=scenario, inputs=INPUTS, queries=10, rate=1000))


def test_an_audit_file_that_lies_about_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "audit.config").write_text("*.*.mode = 2\n*.SingleStream.min_query_count = 5000\n")
    monkeypatch.chdir(tmp_path)
    assert len(drive(doubled, Work(scenario="SingleStream", inputs=INPUTS, queries=10)).latencies_ms) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["audit.config"]  # and nothing is left there
