"""Write the results of a script of ``benchmarks/`` with a run card: the machine, the settings, and a verdict.

The verdict is INVALID, with every reason, if the machine was busy before or after, its clock changed, a ratio's
interval is too wide, or a program was faster than the roofline.
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

from gmmvit_deploy.artifacts import tool_versions
from gmmvit_deploy.bench.core_to_core import round_trip_ns
from gmmvit_deploy.bench.machine import describe_machine, machine_state
from gmmvit_deploy.bench.report import MOST_SPREAD, machine_reasons
from gmmvit_deploy.bench.statistics import Ratio

__all__ = ["unsteady", "written"]


@contextmanager
def written(output: Path, script: str, *, timed: bool = True, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield a dict to fill; at the end write it with its run card. After an error nothing is written.

    script: which script of ``benchmarks/`` ran.  timed: the results are times, which a busy machine spoils.
    A `Ratio` in the dict is written with its three numbers.
    """
    started = time.time()
    load, before, apart = os.getloadavg()[0], machine_state(), round_trip_ns()
    results: dict[str, Any] = {}
    yield results
    after = machine_state()
    reasons = [*machine_reasons(before, after), *unsteady(results)] if timed else []
    results["card"] = {
        "script": script,
        "settings": settings,
        "verdict": "INVALID" if reasons else "VALID",
        "reasons": reasons,
        "versions": tool_versions("openvino"),
        **describe_machine(),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "core_to_core_ns": {"before": apart, "after": round_trip_ns()},
        "before": before.to_json(),
        "after": after.to_json(),
        "seconds": round(time.time() - started, 1),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1, default=asdict) + "\n")
    print("\n".join([f"{results['card']['verdict']}: {output}", *reasons]))


def unsteady(results: Any, place: str = "") -> list[str]:
    """Name every `Ratio` whose interval is wider than `MOST_SPREAD` of it, and every share of a roofline above 1.

    Both show that the machine's speed changed during the measurement. Nested dicts are searched; ``place`` is the
    path of keys so far.
    """
    if isinstance(results, Ratio):
        width = (results.high - results.low) / results.median
        return [f"unstable: {place}: its interval spans {width:.0%} of the ratio"] if width > MOST_SPREAD else []
    if not isinstance(results, dict):
        return []
    share = results.get("share_of_roofline", 0.0)
    reasons = [f"unstable: {place}: {share:.0%} of the roofline"] if share > 1 else []
    return reasons + [
        reason for key, value in results.items() for reason in unsteady(value, f"{place}, {key}" if place else str(key))
    ]
