"""Check a served model: every request gets the logits of the images in this request, however the server batches.

single      requests with a single image, sent in sequence
batches     requests with several images, sent in sequence
mixed       requests of different sizes from concurrent clients, which the server should join into batches;
            the server's number of executions shows whether requests were joined
images      concurrent requests to the ensemble, each with an encoded image
labels      the class names on the server equal the bundle's class names, in the same order
bundle      the SHA-256 that the server reports is the SHA-256 of this bundle
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import NotOfferedError
from gmmvit_deploy.parity._invariance import mixed_up
from gmmvit_deploy.parity._numeric import EXACT, STORED, NumericCheck
from gmmvit_deploy.parity._preprocessing import expected_of_golden
from gmmvit_deploy.parity._quantised import GRAPH
from gmmvit_deploy.parity._runner_check import RunnerCheck
from gmmvit_deploy.parity._verdict import Check, Verdict
from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.progress import Progress
from gmmvit_deploy.runtimes.runners.runner import Served
from gmmvit_deploy.tolerances import Limit

_CLIENTS = 16
_REQUESTS = 160
_MAX_IN_A_REQUEST = 4
_SINGLES = 8
_ROUNDS = 3
_SEED = 3


class ServedCheck(RunnerCheck):
    name = "served"

    def judge(self) -> Check:
        runner, server, on_progress = self.runner, self.runner.server, self.tested.on_progress
        if server is None:
            return self.not_judged(f"{runner.name} runs in this process, without a server")
        limit = self.tested.check(NumericCheck).widest_limit
        inputs, exact = self.run.sent.batch.inputs, self.run.sent.exact
        reference = STORED if self.run.reference is None else EXACT
        if self.graph is not None:
            exact, reference = self.graph.logits(inputs), GRAPH
        judged = _Judged(limit, reference)
        if server.other_bundle:
            judged.reasons.append(f"bundle: {server.other_bundle}")
        on_progress(Progress("single requests"))
        for row in range(min(_SINGLES, len(inputs))):
            judged.add("single requests", runner.run(inputs[row : row + 1]), exact[row : row + 1])
        on_progress(Progress("client batches"))
        for size in sorted({2, 3, min(len(inputs), runner.max_batch)} & set(range(2, runner.max_batch + 1))):
            rows = np.resize(np.arange(len(inputs)), size)
            judged.add("client batches", runner.run(inputs[rows]), exact[rows])
        on_progress(Progress("many clients at once"))
        mixed = self._mixed(server, inputs, exact, judged)
        if self.bundle.manifest.image.normalisation is not None:
            on_progress(Progress("encoded images"))
            self._images_at_once(server, judged)
            if self.bundle.manifest.has_logits:
                judged.reasons += self._label_problems(server)
        verdict: Verdict = "failed" if judged.reasons else "passed" if mixed["joined"] else "undecided"
        requests, executions = mixed["requests"], mixed["executions"]
        if executions is None:
            words = f"{requests} concurrent requests; the server does not offer the number of executions"
            why = (
                f"the server does not offer its statistics, so whether it joined any of the {requests} concurrent "
                "requests is not known; repeat the check on the server itself, not through its gateway"
            )
        else:
            words = f"{requests} concurrent requests ran as {executions} executions"
            why = (
                f"the server ran each of the {requests} concurrent requests alone, so mixing of requests was not "
                "tested; type gmmvit repository with --max-queue-delay-us, or repeat the check on a busier server"
            )
        return Check(
            name=self.name,
            verdict=verdict,
            summary=f"{judged.answers:,} answers, each to its own request; {words}"
            if not judged.reasons
            else server.other_bundle or f"{len(judged.reasons)} problems with the server's answers",
            reasons=(why,) if verdict == "undecided" else tuple(judged.reasons),
            details={"answers": judged.answers, "largest": judged.largest, "limit": limit.largest, **mixed},
        )

    def _mixed(self, server: Served, inputs: NDArray[Any], exact: NDArray[Any], judged: _Judged) -> dict[str, Any]:
        """Send up to `_ROUNDS` rounds of concurrent requests, until the server has joined requests into a batch.

        ``joined``, requests − executions, is never too high: other clients, such as the probes of a supervisor, can
        only add executions. Both are None if the server does not offer its statistics, as behind a gateway.
        """
        runner, generator = self.runner, np.random.default_rng(_SEED)
        largest = min(_MAX_IN_A_REQUEST, runner.max_batch)
        requests = executions = 0
        for _ in range(_ROUNDS):
            asked = [
                np.resize(generator.permutation(len(inputs)), int(size))
                for size in generator.integers(1, largest + 1, _REQUESTS)
            ]
            before = _counts(server)
            with ThreadPoolExecutor(max_workers=_CLIENTS) as pool:
                answers = list(pool.map(lambda rows: runner.run(inputs[rows]), asked))
            for rows, logits in zip(asked, answers, strict=True):
                judged.add("many clients at once", logits, exact[rows], among=exact)
            after = None if before is None else _counts(server)
            if before is None or after is None:
                return {"requests": len(asked), "executions": None, "joined": None}
            requests += len(asked)
            executions += min(after - before, len(asked))
            if executions < requests:
                break
        return {"requests": requests, "executions": executions, "joined": requests - executions}

    def _images_at_once(self, server: Served, judged: _Judged) -> None:
        golden, images = expected_of_golden(self.bundle, self.graph), self.bundle.golden_set().images
        chosen: list[int] = np.random.default_rng(_SEED).integers(0, len(images), _REQUESTS // 2).tolist()
        with ThreadPoolExecutor(max_workers=_CLIENTS) as pool:
            answers = list(pool.map(lambda index: server.infer(np.array([[images[index]]], np.object_)), chosen))
        for index, logits in zip(chosen, answers, strict=True):
            judged.add("encoded images, many clients at once", logits, golden[index : index + 1], among=golden)

    def _label_problems(self, server: Served) -> list[str]:
        labels = self.bundle.manifest.labels
        reasons = []
        if server.connection.model(server.ensemble).label_set != self.bundle.manifest.label_set:
            reasons.append(
                "labels: expected the bundle's classes in the bundle's order, its task and thresholds, got others from "
                f"{server.ensemble} on the server"
            )
        golden = self.bundle.golden_set().images[: self.runner.max_batch]
        images = np.array([[image] for image in golden], dtype=np.object_)
        for index, label in server.connection.best_classes(server.ensemble, "IMAGE", images):
            if labels[index] != label:
                reasons.append(f"labels: expected {labels[index]!r} for class {index}, got {label!r} from the server")
                break
        return reasons


class _Judged:
    """Compare the server's logits with the expected logits, and keep the first reason for each kind of request."""

    def __init__(self, limit: Limit, reference: str) -> None:
        self._limit, self._reference = limit, reference
        self._failed: set[str] = set()
        self.reasons: list[str] = []
        self.answers = 0
        self.largest = 0.0

    def add(self, kind: str, logits: NDArray[Any], exact: NDArray[Any], among: NDArray[Any] | None = None) -> None:
        """Judge the logits (B, C) of a request of a kind.  among: the expected logits of all concurrent requests."""
        self.answers += len(logits)
        largest = distance(logits, exact)
        self.largest = float(np.fmax(self.largest, largest))
        if largest <= self._limit.largest or kind in self._failed:
            return
        self._failed.add(kind)
        whose = _whose(logits, exact, exact if among is None else among)
        self.reasons.append(
            f"{kind}: logits differ by up to {largest:.3g} from {self._reference}; "
            f"expected at most {self._limit.largest:.3g}{whose}"
        )


def _whose(logits: NDArray[Any], exact: NDArray[Any], among: NDArray[Any]) -> str:
    if logits.shape != exact.shape:
        return f": expected logits {exact.shape}, got {logits.shape}"
    for row, own in zip(logits, exact, strict=True):
        strays = mixed_up(np.repeat(row[None], 2, 0), np.stack([own, among[np.square(among - row).sum(1).argmin()]]))
        if any(stray == (0, 1) for stray in strays):
            return ": a request got the answer to another request"
    return ""


def _counts(server: Served) -> int | None:
    try:
        return server.connection.counts(server.network)[1]
    except NotOfferedError:
        return None
