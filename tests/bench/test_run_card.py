"""The run card of a result, and the timing of programs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.bench import interleaved, run_card
from gmmvit_deploy.bench.control import Change
from gmmvit_deploy.bench.machine import MachineState, describe_machine
from gmmvit_deploy.bench.statistics import Ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.bundle.artifacts import tool_versions


class TestRunCard:
    @pytest.fixture(autouse=True)
    def calm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = MachineState(load=0.1, others=0.0, stolen=0.0, spin_ms=1.0, megahertz=())
        monkeypatch.setattr(run_card, "machine_state", lambda: state)

    def test_a_problem_makes_the_run_invalid_also_without_times(self, tmp_path: Path) -> None:
        with run_card.written(tmp_path / "result.json", "script.py", timed=False) as results:
            results["problems"] = ["1 requests were lost"]
        card = json.loads((tmp_path / "result.json").read_text())["card"]
        assert (card["verdict"], card["reasons"]) == ("INVALID", ["1 requests were lost"])

    def card(self, path: Path, measured: Any, *, timed: bool = True) -> dict[str, Any]:
        with run_card.written(path / "result.json", "script.py", timed=timed, rounds=3) as results:
            results["vit"] = {"1": {"over_plain": measured}}
        card: dict[str, Any] = json.loads((path / "result.json").read_text())["card"]
        return card

    def test_a_calm_machine_and_narrow_intervals_are_valid(self, tmp_path: Path) -> None:
        card = self.card(tmp_path, Ratio(median=1.0, low=0.95, high=1.1))
        assert (card["verdict"], card["reasons"], card["settings"]) == ("VALID", [], {"rounds": 3})

    def test_a_ratio_with_a_wide_interval_is_unstable(self, tmp_path: Path) -> None:
        wide = Ratio(median=1.0, low=0.8, high=1.1)
        card = self.card(tmp_path, wide)
        assert card["verdict"] == "INVALID"
        reason = "the interval spans 30% of the ratio, expected at most 25%"
        assert card["reasons"] == [f"unstable: vit, 1, over_plain: {reason}"]
        assert self.card(tmp_path, wide, timed=False)["verdict"] == "VALID"

    def test_nothing_is_faster_than_the_hardware(self, tmp_path: Path) -> None:
        card = self.card(tmp_path, {"share_of_roofline": 1.02})
        assert card["reasons"] == ["unstable: vit, 1, over_plain: 102% of the roofline, expected at most 100%"]
        assert self.card(tmp_path, {"share_of_roofline": 0.98})["verdict"] == "VALID"

    def test_a_busy_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        busy = MachineState(load=2.0, others=0.5, stolen=0.0, spin_ms=1.0, megahertz=())
        monkeypatch.setattr(run_card, "machine_state", lambda: busy)
        card = self.card(tmp_path, Ratio(median=1.0, low=1.0, high=1.0))
        assert card["verdict"] == "INVALID"
        assert "other programs took 50%" in card["reasons"][0]

    def test_nothing_is_written_after_an_error(self, tmp_path: Path) -> None:
        def fail() -> None:
            with run_card.written(tmp_path / "result.json", "script.py"):
                raise SystemExit("answers are wrong")

        with pytest.raises(SystemExit):
            fail()
        assert list(tmp_path.iterdir()) == []

    def test_a_ratio_is_written_with_its_interval_and_the_card_with_the_machine(self, tmp_path: Path) -> None:
        card = self.card(tmp_path, Ratio(median=1.0, low=0.95, high=1.1))
        written = json.loads((tmp_path / "result.json").read_text())["vit"]["1"]["over_plain"]
        assert written == {"median": 1.0, "low": 0.95, "high": 1.1}
        assert card["versions"] == tool_versions("openvino")
        assert card.items() >= describe_machine().items()


class TestTurns:
    def test_every_round_has_every_name_once_and_twins_together(self) -> None:
        names = ["a", "b", "a plain", "c"]
        taken = list(interleaved.turns(names, 50, np.random.default_rng(0), warm_ups=2))
        assert [counts for _, counts in taken] == [False] * 2 * 4 + [True] * 50 * 4
        rounds = [[name for name, _ in taken[start : start + 4]] for start in range(0, len(taken), 4)]
        assert all(sorted(names) == sorted(order) for order in rounds)
        assert all(abs(order.index("a") - order.index("a plain")) == 1 for order in rounds)
        assert {order[0] for order in rounds} == set(names)

    def test_programs_of_a_round_get_the_same_images_and_every_round_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(interleaved, "UNTIMED_S", 0.0)
        seen: dict[str, list[float]] = {"first": [], "second": []}

        def program(name: str) -> interleaved.Program:
            def run(images: np.ndarray) -> np.ndarray:
                seen[name].append(float(images.sum()))
                return images[:, 0, 0]

            return run

        timed = interleaved.time_rounds({name: [program(name)] for name in seen}, 16, 5, image_shape=(1, 4, 6))
        assert timed.images.shape == (16, 1, 4, 6)
        assert seen["first"] == seen["second"]
        assert len(set(seen["first"])) == 3 + 5  # warm-ups and rounds
        assert {name: ms.shape for name, ms in timed.ms.items()} == {"first": (5,), "second": (5,)}
        np.testing.assert_array_equal(timed.logits["second"], timed.images[:, 0, 0])

    def test_two_programs_lead_in_turn(self) -> None:
        order: list[int] = []

        def program(number: int) -> interleaved.Program:
            def run(images: np.ndarray) -> np.ndarray:
                order.append(number)
                return images + number

            return run

        images = np.zeros((1, 2), np.float32)
        times, logits = interleaved.time_in_turn(program(0), program(1), images, 2, 1)
        assert order == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1]  # once each, then two turns: one untimed run, one timed
        assert times.shape == (2, 2)
        assert [float(answer[0, 0]) for answer in logits] == [0.0, 1.0]


def test_a_ratio_in_words() -> None:
    assert ratio_words(Ratio(median=1.0123, low=0.99, high=1.5)) == "1.012 (0.990–1.500)"


@pytest.mark.parametrize(
    ("change", "control", "verdict", "allowed"),
    [
        (1.019, 1.0, "as fast", 0.02),
        (1.021, 1.0, "slower", 0.02),
        (0.97, 1.01, "faster", 0.02),
        (1.04, 1.05, "as fast", 0.05),
        (1.04, 0.95, "as fast", 0.05),
        (1.06, 0.95, "slower", 0.05),
    ],
)
def test_a_change_is_judged_against_the_control(change: float, control: float, verdict: str, allowed: float) -> None:
    ratios = [Ratio(median=median, low=median, high=median) for median in (change, control)]
    judged = Change(ratio=ratios[0], control=ratios[1])
    assert judged.verdict == verdict
    assert judged.allowed == pytest.approx(allowed)
