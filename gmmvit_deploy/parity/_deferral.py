"""Check that a cascade computes those images again that its record says, and no others.

An image is computed again if its margin in the first program is below the threshold (`inference.cascade`). The runner's
own logits show the margin of each image that is not; for one that is, the margin is that of the quantised graph, or of
PyTorch for bf16. Both margins of an image differ by what the runtime changes, which the images with both show.

The threshold must be the one that the recorded margins choose (`bundle.cascades`), and the recorded margins of the
reference inputs those of this network.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bundle.cascades import CascadeRecord, chosen_threshold
from gmmvit_deploy.inference.cascade import decision_margins
from gmmvit_deploy.intervals import share_interval
from gmmvit_deploy.parity._numeric import NumericCheck
from gmmvit_deploy.parity._runner_check import Answers, RunnerCheck, RunnerUnderTest
from gmmvit_deploy.parity._verdict import Check, passed_unless
from gmmvit_deploy.runtimes.runners.cascade import label_thresholds

_MAX_OFF = 2.0
"""How many times as far as on any image with both margins they may be apart on another."""
_MAX_MEAN_OFF = 4.0
"""How many times as far as on these images they may be apart on average on the reference inputs, elsewhere recorded."""
_MIN_ANSWERED = 16
"""On fewer images with both margins, the limit of the numeric check counts."""


class DeferralCheck(RunnerCheck):
    name = "deferral"

    def __init__(self, tested: RunnerUnderTest) -> None:
        super().__init__(tested)
        self._thresholds = label_thresholds(self.bundle) if self.runner.record is not None else None
        none = np.zeros(0)
        self._rows = [(none, none, none.astype(bool), none.astype(bool))]  # own, expected margin; deferred; counts

    def add(self, answers: Answers) -> None:
        if answers.deferred is None:
            return
        expected = answers.known.exact if answers.of_graph is None else answers.of_graph
        of_each = (decision_margins(logits, self._thresholds) for logits in (answers.comparable, expected))
        counts = answers.real and answers.batch == self.tested.batches[-1]  # each image once
        self._rows.append((*of_each, answers.deferred, np.full(len(expected), counts)))

    def judge(self) -> Check:
        record = self.runner.record
        if record is None:
            return self.not_judged("only a cascade computes images again")
        own, expected, deferred, counts = map(np.concatenate, zip(*self._rows, strict=True))
        reasons = [*_record_problems(record), *self._margin_problems(record, own, expected, deferred)]
        reasons += self._golden_problems(record, np.abs(own - expected)[~deferred])
        before, count = record.chosen.deferred, int(counts.sum())
        details: dict[str, Any] = {"threshold": record.threshold, "recorded": before, "curve": record.curve}
        summary = str(record)
        if count:
            again = int(deferred[counts].sum())
            low, high = share_interval(again, count)
            details |= {"images": count, "deferred": again / count, "deferred_interval": [low, high]}
            more = "; more than of those, so these images differ from them" if low > before else ""
            summary += f"; {again / count:.1%} ({low:.1%} to {high:.1%}) of the images of the data{more}"
        return passed_unless(reasons, self.name, summary, **details)

    def _margin_problems(
        self, record: CascadeRecord, own: NDArray[Any], expected: NDArray[Any], deferred: NDArray[Any]
    ) -> list[str]:
        problems = []
        answered = ~deferred
        if low := int((own[answered] < record.threshold).sum()):
            problems.append(
                f"{low} of {answered.sum()} images that the first program answered have a margin below the threshold "
                f"{record.threshold:.4g}, the smallest {own[answered].min():.4g}: another threshold or measure decides"
            )
        enough = answered.sum() >= _MIN_ANSWERED
        off = _MAX_OFF * np.abs(own - expected)[answered].max() if enough else self._limit
        too_high = deferred & (expected > record.threshold + off)
        if too_high.any():
            problems.append(
                f"{too_high.sum()} of {deferred.sum()} images that float32 computed again have a margin above the "
                f"threshold {record.threshold:.4g}, up to {expected[too_high].max():.4g}: another threshold or measure "
                "decides"
            )
        return problems

    @property
    def _limit(self) -> float:
        """How far margins may be apart: two logits, each by the limit of the numeric check."""
        return 2 * self.tested.check(NumericCheck).widest_limit.largest

    def _golden_problems(self, record: CascadeRecord, apart: NDArray[Any]) -> list[str]:
        """apart: how far the margins of the runner and of the graph are apart, of each image with both."""
        golden = self.run.kept["golden"]
        logits = self.graph.logits(golden.batch.inputs) if self.graph is not None else golden.exact
        margins = decision_margins(logits, self._thresholds)
        recorded = np.array(record.golden_margins)
        limit = _MAX_MEAN_OFF * float(apart.mean()) if len(apart) >= _MIN_ANSWERED else self._limit
        if recorded.shape == margins.shape and np.abs(recorded - margins).mean() <= limit:
            return []
        return [
            "the recorded margins of the reference inputs are not those of this network: the threshold was chosen for "
            "another"
        ]


def _record_problems(record: CascadeRecord) -> list[str]:
    threshold = chosen_threshold(np.array(record.margins), np.array(record.losses), record.keep_decisions)
    if threshold == record.threshold:
        return []
    return [
        f"the threshold {record.threshold:.6g} is not the one that the recorded margins choose for "
        f"{record.keep_decisions:.2%} of the decisions, {threshold:.6g}"
    ]
