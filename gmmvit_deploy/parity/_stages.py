"""Divide the difference of a quantised runner from PyTorch, on real images, into the stages that cause it.

    quantisation   the quantised graph, with every rounding and apart from any runtime, against PyTorch's float64 logits
    runtime        the runtime with its own operators against the quantised graph
    kernels        this project's CPU kernels against the runtime's own operators, in the same runtime and graph

Each stage has a signal-to-noise ratio (`tolerances.signal_to_noise_db`), and the number of images whose decision it
changes. The operators of a server cannot be exchanged: its kernels belong to its stage ``runtime``.

A runtime rounds some values to another step of the grid than the graph, and so differs from it: by up to
1.1 times what quantisation costs (rms) in correct runtimes, and kernels in bfloat16 by 1.2 times, over any 8 images;
single images reach 2.2 times. On `LEAST_IMAGES` or more, a stage may cost up to `MOST_COST` times as much as
quantisation; kernels, also the noise of bfloat16.

The runtime must also keep the graph's rounding (`RoundingKept`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.parity._quantised import RoundingKept, rounding_problem
from gmmvit_deploy.parity._verdict import Check, skipped_check
from gmmvit_deploy.parity.measures import ErrorMeasure
from gmmvit_deploy.tolerances import roundoff_ratio

__all__ = ["LEAST_IMAGES", "MOST_COST", "Stages"]

NAME = "stages"
MOST_COST = 1.5
LEAST_IMAGES = 8


@dataclass(slots=True)
class _Stage:
    """The difference between the logits before and after a stage, and the images whose decision changes."""

    error: ErrorMeasure = field(default_factory=ErrorMeasure)
    changed: int = 0


class Stages:
    """Accumulate the stages of a runner, batch by batch."""

    def __init__(self, decided: Callable[[NDArray[Any]], NDArray[Any]] | None, *, over_images: bool) -> None:
        """decided: returns the decisions (B, …) of logits (B, C); None for features, which decide nothing.

        over_images: as in `tolerances.signal_to_noise_db`.
        """
        self._decided, self._over_images = decided, over_images
        self._stages: dict[str, _Stage] = {}
        self._all, self._features, self._noise = ErrorMeasure(), ErrorMeasure(), ErrorMeasure()
        self._kept = RoundingKept()
        self._images = 0

    def add(
        self,
        logits: NDArray[Any],
        trained: NDArray[Any],
        exact: NDArray[Any],
        *,
        of_graph: NDArray[Any] | None = None,
        without_kernels: NDArray[Any] | None = None,
        features: tuple[NDArray[Any], NDArray[Any]] | None = None,
    ) -> None:
        """Add a batch of real images.

        logits: (B, C), of the runner.  trained, exact: (B, C), PyTorch's in float32 and float64.
        of_graph: (B, C), of the quantised graph; None if the runner is not quantised, and has no stages.
        without_kernels: (B, C), of the same runtime and graph without this project's kernels; None without kernels.
        features: the runner's and PyTorch's float64 features (B, D), if the bundle has them beside logits.
        """
        self._images += len(logits)
        self._all.add(logits, exact)
        self._noise.add(trained, exact)
        if features is not None:
            self._features.add(*features)
        if of_graph is None:
            return
        of_runtime = logits if without_kernels is None else without_kernels
        self._kept.add(of_runtime, of_graph, exact)
        self._add_to("quantisation", exact, of_graph)
        self._add_to("runtime", of_graph, of_runtime)
        if without_kernels is not None:
            self._add_to("kernels", without_kernels, logits)

    def _add_to(self, name: str, before: NDArray[Any], after: NDArray[Any]) -> None:
        stage = self._stages.setdefault(name, _Stage())
        stage.error.add(after, before)
        if self._decided is not None:
            lost = ~np.isfinite(after).all(1)
            stage.changed += int((lost | (self._decided(before) != self._decided(after)).any(1)).sum())

    @property
    def blamed(self) -> str:
        """The stage that a failed gate is due to: a stage that fails, else quantisation."""
        if not self._stages:
            return "the precision"
        return next((name for name, _ in self._problems()), "quantisation")

    @property
    def of_graph(self) -> float | None:
        """The signal-to-noise ratio of the quantised graph's logits; None without real images."""
        return self._db("quantisation") if self._stages else None

    def _db(self, name: str) -> float:
        return self._stages[name].error.db(over_images=self._over_images)

    def check(self, snr_db: float | None, least_cosine: float | None, *, skipped: str) -> Check:
        """Judge the stages, and the whole runner by the gates that the user typed, or None.

        skipped: why no image was judged, for that case.
        """
        if not self._images:
            return skipped_check(NAME, skipped)
        db, cosine = self._all.db(over_images=self._over_images), self._all.errors().cosine
        of = "features" if self._decided is None else "logits"
        if self._features.errors().rows:
            of, cosine = "features", self._features.errors().cosine
        stages = {
            name: {"db": self._db(name), **({} if self._decided is None else {"changed": stage.changed})}
            for name, stage in self._stages.items()
        }
        words = [
            f"{name} {numbers['db']:.1f} dB" + (f", {numbers['changed']} decisions" if "changed" in numbers else "")
            for name, numbers in stages.items()
        ]
        reasons = [f"{name}: {why}" for name, why in self._problems()]
        # NaN, of a runner without finite logits, passes no gate.
        if snr_db is not None and not db >= snr_db:
            reasons.append(f"{self.blamed}: {db:.1f} dB, expected at least {snr_db:g} dB")
        if least_cosine is not None and not cosine >= least_cosine:
            reasons.append(f"{self.blamed}: least cosine {cosine:.4f} of the {of}, expected at least {least_cosine:g}")
        return Check(
            name=NAME,
            verdict="failed" if reasons else "passed",
            summary="; ".join(
                [
                    f"{db:.1f} dB{_gate(snr_db)}, least cosine {cosine:.4f}{_gate(least_cosine)} of the {of}, on "
                    f"{self._images:,} images",
                    *words,
                ]
            ),
            reasons=tuple(reasons),
            details={
                "images": self._images,
                "db": db,
                "least_cosine": cosine,
                "cosine_of": of,
                "rounding_kept": self._kept.share,
                "stages": stages,
            },
        )

    def _problems(self) -> list[tuple[str, str]]:
        """Return (stage, what is wrong with it)."""
        if not self._stages:
            return []
        whole = self._stages["quantisation"].error.errors().rms
        problems = []
        for name, stage in list(self._stages.items())[1:]:
            errors, limit = stage.error.errors(), MOST_COST * whole
            if name == "kernels":
                limit = max(limit, roundoff_ratio("bf16") * self._noise.errors().rms)
            if errors.broken:
                problems.append((name, f"the logits of {errors.broken} of {errors.rows} images are not finite"))
            elif self._images < LEAST_IMAGES:
                continue
            elif errors.rms > limit:
                problems.append(
                    (
                        name,
                        f"changes the logits by {errors.rms:.3g} (rms), and quantisation by {whole:.3g}; expected at "
                        f"most {limit:.3g}",
                    )
                )
            elif name == "runtime" and (why := rounding_problem(self._kept.share)):
                problems.append((name, why))
        return problems


def _gate(least: float | None) -> str:
    return "" if least is None else f" (gate {least:g})"
