"""Write the results of a script in ``benchmarks/`` with a run card: the machine, versions, settings and a verdict.

The verdict is INVALID, with every reason, if the machine was busy or changed its clock rate, if the interval of a ratio
is too wide, if a program was faster than its roofline, and for each sentence of ``problems``, also without times.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gmmvit_deploy.bench.machine import describe_machine, machine_state
from gmmvit_deploy.bench.report import MAX_SPREAD, machine_reasons
from gmmvit_deploy.bundle.artifacts import tool_versions
from gmmvit_deploy.intervals import Measured


@contextmanager
def written(output: Path, script: str, *, timed: bool = True, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield a dictionary for the results, and write it with its run card at the end; after an error, nothing is
    written.

    timed: True if the results are times, for which a busy machine and a wide interval make the run INVALID. Each
    sentence of ``problems`` in the dictionary does so too.
    """
    started = time.time()
    load, before = os.getloadavg()[0], machine_state()
    results: dict[str, Any] = {}
    yield results
    after = machine_state()
    reasons = [*machine_reasons(before, after), *unsteady(results)] if timed else []
    reasons += results.get("problems", [])
    results["card"] = {
        "script": script,
        "settings": settings,
        "verdict": "INVALID" if reasons else "VALID",
        "reasons": reasons,
        "versions": tool_versions("openvino"),
        **describe_machine(),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "before": asdict(before),
        "after": asdict(after),
        "seconds": round(time.time() - started, 1),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1, default=asdict) + "\n")
    print("\n".join([f"{results['card']['verdict']}: {output}", *reasons]))


def unsteady(results: Any, place: str = "") -> list[str]:
    """Return a reason for every `Measured` ratio wider than `MAX_SPREAD`, and for every share of a roofline above 1.

    Both show that the speed of the machine changed. Nested dictionaries are searched; place: the keys above.
    """
    if isinstance(results, Measured):
        width = (results.high - results.low) / results.value
        if not width > MAX_SPREAD:
            return []
        return [f"unstable: {place}: the interval spans {width:.0%} of the ratio, expected at most {MAX_SPREAD:.0%}"]
    if not isinstance(results, dict):
        return []
    share = results.get("share_of_roofline", 0.0)
    reasons = [f"unstable: {place}: {share:.0%} of the roofline, expected at most 100%"] if share > 1 else []
    return reasons + [
        reason for key, value in results.items() for reason in unsteady(value, f"{place}, {key}" if place else str(key))
    ]
