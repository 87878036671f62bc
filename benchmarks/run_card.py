"""What a benchmark ran on, and whether it may be believed: written beside every result.

INVALID, with every reason: the machine was busy before or after, its clock changed, a ratio's interval is so wide
that the ratio says nothing, or a program was faster than the roofline.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from core_to_core import round_trip_ns

from gmmvit_deploy.bench.machine import cpu_name, gpu_names, machine_state
from gmmvit_deploy.bench.report import MOST_SPREAD, machine_reasons

__all__ = ["written"]

PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy")


@contextmanager
def written(output: Path, script: str, *, timed: bool = True, **settings: Any) -> Iterator[dict[str, Any]]:
    """Hands out a dict to fill; at the end it is written with its card, or after an error nothing is.

    timed: the results are times, which a busy machine spoils.
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
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpus": gpu_names(),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "core_to_core_ns": {"before": apart, "after": round_trip_ns()},
        "before": before.to_json(),
        "after": after.to_json(),
        "seconds": round(time.time() - started, 1),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join([f"{results['card']['verdict']}: {output}", *reasons]))


def unsteady(results: Any, place: str = "") -> list[str]:
    """Every ratio in there whose interval is wider than `MOST_SPREAD` of it, and every share of a roofline above 1:
    the machine was slower while that was measured. With where it stands.
    """
    if not isinstance(results, dict):
        return []
    if results.keys() >= {"median", "low", "high"}:
        width = (results["high"] - results["low"]) / results["median"]
        return [f"unstable: {place}: its interval is {width:.0%} of it wide"] if width > MOST_SPREAD else []
    share = results.get("share_of_roofline", 0.0)
    found = [f"unstable: {place}: {share:.0%} of the roofline"] if share > 1 else []
    return found + [
        reason for key, value in results.items() for reason in unsteady(value, f"{place}, {key}" if place else str(key))
    ]
