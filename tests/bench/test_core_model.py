"""A model of the cores predicts what more cores than two do, and where `gmmvit tune` starts."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from gmmvit_deploy.bench import core_model, core_parts
from gmmvit_deploy.bench.core_model import CoreModel, bandwidths, divisions_of
from gmmvit_deploy.bench.core_parts import measured_parts
from gmmvit_deploy.bench.roofline import NetworkWork
from gmmvit_deploy.bench.tune import climb_order
from tests.waiting import best_of

MODEL = CoreModel(
    image_ms=10.0,
    products_ms=8.0,
    chunk_image_ms=5.0,
    chunk=4,
    operators=100,
    round_trip_ns=100.0,
    weight_bytes=10_000_000,
    bandwidth=10e9,
    bandwidth_of_two=20e9,
)


def test_a_single_core_takes_what_was_measured() -> None:
    assert MODEL.latency_ms(1) == 10.0
    assert MODEL.batch_rate(1) == 200.0


@pytest.mark.parametrize(("threads", "expected"), [(2, 2 + 4 + 0.01), (4, 2 + 2 + 0.03), (8, 2 + 1 + 0.07)])
def test_threads_divide_the_products_only(threads: int, expected: float) -> None:
    assert MODEL.latency_ms(threads) == pytest.approx(expected)


def test_distant_cores_make_many_threads_lose() -> None:
    far = replace(MODEL, round_trip_ns=3500.0)
    assert far.latency_ms(64) > far.latency_ms(4)
    assert MODEL.latency_ms(64) < MODEL.latency_ms(4)


def test_the_bandwidth_limits_what_cores_add() -> None:
    """Two cores copy no more than one, so a further core brings no bandwidth."""
    shared = replace(MODEL, bandwidth=1e9, bandwidth_of_two=1e9)
    assert shared.bandwidth_of(64) == pytest.approx(1e9)
    assert shared.batch_rate(64) == pytest.approx(400)  # 1e9 bytes a second / (10 MB for 4 images)
    assert shared.latency_ms(1, beside=4) == pytest.approx(40.0)
    assert MODEL.batch_rate(64) == pytest.approx(64 * 200)


def test_several_instances_win_until_the_bound() -> None:
    rows = MODEL.divisions(8)
    assert [(row.instances, row.threads) for row in rows] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert [row.rate for row in rows] == sorted(row.rate for row in rows)
    assert MODEL.best_division(8).instances == 8
    assert MODEL.best_division(8, bound_ms=7).instances == 4
    assert MODEL.best_division(8, bound_ms=4.5).instances == 2
    assert MODEL.best_division(8, bound_ms=0.1).instances == 1  # the lowest latency, as no division keeps the bound


def test_products_are_a_part_of_the_image() -> None:
    with pytest.raises(ValueError, match=r"products_ms: expected more than 0 and at most 10\.0, got 11"):
        replace(MODEL, products_ms=11.0)


@pytest.mark.parametrize(("cores", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4]), (64, [1, 2, 4, 8, 16, 32, 64])])
def test_divisions(cores: int, expected: list[int]) -> None:
    assert divisions_of(cores) == expected


def test_the_search_starts_at_the_prediction() -> None:
    assert climb_order([2, 4, 8, 16], 8) == [[8, 16], [4, 2]]
    assert climb_order([2, 4], 1) == [[2, 4], []]
    assert climb_order([], 2) == [[], []]


def test_parts_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    work = NetworkWork(
        batch=1,
        operations=2 * 64 * 64 * 64 * 3,
        products={(64, 64, 64): 2},
        multiplications=3,
        weight_values=8192,
        input_bytes=0,
        output_bytes=0,
    )
    weights = np.eye(64, dtype=np.float32)

    def run(images: np.ndarray) -> np.ndarray:
        for _ in range(50):
            images = images @ weights
        return images

    monkeypatch.setattr(core_parts, "_SECONDS", 0.02)
    monkeypatch.setattr(core_parts, "round_trip_ns", lambda: 80.0)
    model = measured_parts(run, work, np.ones((4, 64, 64), np.float32))
    assert model is not None
    assert (model.chunk, model.operators, model.weight_bytes, model.round_trip_ns) == (4, 3, 4 * 8192, 80.0)
    assert 0 < model.products_ms <= model.image_ms
    assert model.bandwidth > 0
    monkeypatch.setattr(core_parts, "round_trip_ns", lambda: None)
    assert measured_parts(run, work, np.ones((4, 64, 64), np.float32)) is None


def test_bandwidth_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which every copy takes a second."""
    seconds = count()
    monkeypatch.setattr(core_model, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    monkeypatch.setattr(core_model, "_COPIED_BYTES", 8000)
    assert bandwidths() == (2 * 8000, 4 * 8000)


@pytest.mark.alone
def test_bandwidth_of_two_cores_is_of_both() -> None:
    """Two cores copy from 0.4 to 4 times as much as one."""

    def off() -> float:
        single, both = bandwidths()
        return max(0.4 * single / both, both / (4 * single))

    assert best_of(3, off, enough=1) < 1
