"""Summarise a benchmark in a sentence for readers who quote it, and list what would change its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gmmvit_deploy.bench.report import MOST_OTHERS, MOST_SPREAD
from gmmvit_deploy.pages import Summary

__all__ = ["summary_of"]

Result = Mapping[str, Any]


def summary_of(result: Result) -> Summary:
    """Return the summary of a result.  result: as `BenchReport.to_json` returns it."""
    if result["reasons"]:
        count = len(result["reasons"])
        wrong = [cell for cell in result["cells"] if not cell["outputs"]["right"]]
        answers = "; some answers were wrong" if wrong else ""
        sentence = f"Do not quote these numbers: {count} reason{'s' * (count > 1)} against the run{answers}."
        return Summary(
            outcome="failed", word=result["verdict"], sentence=sentence, changes=(*result["reasons"], *_scope(result))
        )
    return Summary(
        outcome="passed",
        word=result["verdict"],
        sentence=f"These numbers may be quoted with their run card. {_fastest(result)}",
        changes=(*_nearest_limits(result), *_open_comparisons(result), *_scope(result)),
    )


def _fastest(result: Result) -> str:
    timed = [cell for cell in result["cells"] if cell["scenario"] != "Offline"]
    sentences = []
    if timed:
        batch = min(cell["batch"] for cell in timed)
        fastest = min((cell for cell in timed if cell["batch"] == batch), key=lambda cell: cell["median_ms"])
        sentences.append(f"Lowest median latency at batch {batch}: {fastest['runner']}, {fastest['median_ms']:.3f} ms.")
    if result["cells"]:
        most = max(result["cells"], key=lambda cell: cell["samples_per_second"])
        sentences.append(
            f"Highest throughput: {most['runner']}, {most['samples_per_second']:,.0f} images a second "
            f"({most['scenario']}, batch {most['batch']})."
        )
    return " ".join(sentences)


def _nearest_limits(result: Result) -> Iterator[str]:
    """Yield how close a valid run is to the limits of validity."""
    if result["cells"]:
        widest = max(result["cells"], key=lambda cell: cell["spread"])
        yield (
            f"The rounds of {widest['runner']}, {widest['scenario']}, batch {widest['batch']} are spread over "
            f"{widest['spread']:.0%} of their median, the widest here; above {MOST_SPREAD:.0%} the run is invalid"
        )
    others = max(result[when]["others"] for when in ("before", "after"))
    yield f"Other programs took {others:.0%} of the machine; above {MOST_OTHERS:.0%} the run is invalid"


def _open_comparisons(result: Result) -> Iterator[str]:
    """Yield a sentence for each ratio whose interval contains 1: neither runner is shown to be faster."""
    for ratio in result["ratios"]:
        if ratio["low"] <= 1 <= ratio["high"]:
            yield (
                f"{ratio['runner']} and {ratio['over']} are not shown to differ at {ratio['scenario']}, batch "
                f"{ratio['batch']} (ratio {ratio['low']:.3f} to {ratio['high']:.3f}): more --rounds narrow the interval"
            )


def _scope(result: Result) -> Iterator[str]:
    if result["skipped"]:
        yield f"What was skipped ({len(result['skipped'])}, listed below with the reasons): it was not measured"
    yield "Another machine, bundle, setting or version: the numbers hold for the run card below, for nothing else"
