"""Summarise a benchmark in a few sentences that readers can quote, and list what would change the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gmmvit_deploy.bench.report import MOST_OTHERS, MOST_SPREAD
from gmmvit_deploy.reports.pages import Summary

__all__ = ["summary_of"]

Result = Mapping[str, Any]


def summary_of(result: Result) -> Summary:
    """Return the summary of a result.  result: the result, as `BenchReport.to_json` returns it."""
    if result["reasons"]:
        count = len(result["reasons"])
        wrong = [cell for cell in result["cells"] if not cell["outputs"]["right"]]
        answers = "; some answers were wrong" if wrong else ""
        sentence = f"Do not quote these numbers: the run is invalid for {count} reason{'s' * (count > 1)}{answers}."
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
    """Yield sentences on how close a valid run is to being invalid."""
    if result["cells"]:
        widest = max(result["cells"], key=lambda cell: cell["spread"])
        yield (
            f"The largest spread of rounds is {widest['spread']:.0%} of their median, for {widest['runner']}, "
            f"{widest['scenario']}, batch {widest['batch']}; above {MOST_SPREAD:.0%} the run is invalid"
        )
    others = max(result[when]["others"] for when in ("before", "after"))
    yield f"Other programs took {others:.0%} of the machine; above {MOST_OTHERS:.0%} the run is invalid"


def _open_comparisons(result: Result) -> Iterator[str]:
    """Yield a sentence for each ratio whose interval contains 1: such a ratio does not show which runner is faster."""
    for ratio in result["ratios"]:
        if ratio["low"] <= 1 <= ratio["high"]:
            yield (
                f"{ratio['runner']} and {ratio['over']} are not shown to differ in {ratio['scenario']}, "
                f"batch {ratio['batch']} (ratio {ratio['low']:.3f} to {ratio['high']:.3f}); "
                "more --rounds make this interval narrower"
            )


def _scope(result: Result) -> Iterator[str]:
    if count := len(result["skipped"]):
        yield f"{count} measurement{'s were' if count > 1 else ' was'} skipped; the reasons are listed below"
    yield "The numbers only hold for the machine, bundle, settings and versions in the run card below"
