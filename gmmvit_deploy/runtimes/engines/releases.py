"""Releases of NVIDIA's Triton container, and the oldest of them without a fault that NVIDIA has published."""

from __future__ import annotations

import re

# Release → (Triton version, TensorRT version) in the container. TensorRT "": no source states it. A release is missing
# if no source states its Triton version. Sources: NVIDIA's release notes up to 25.06, and for 26.04 and 26.10; issues
# of triton-inference-server (pytriton 108: 25.07, server 8969: 26.07) and its guide to builds for RHEL (26.05); for the
# others, what people publish who run the containers, such as their start messages.
RELEASES = {
    "24.06": ("2.47.0", "10.1.0"),
    "24.07": ("2.48.0", "10.2.0"),
    "24.08": ("2.49.0", "10.3.0"),
    "24.09": ("2.50.0", "10.4.0"),
    "24.10": ("2.51.0", "10.5.0"),
    "24.11": ("2.52.0", "10.6.0"),
    "24.12": ("2.53.0", "10.7.0"),
    "25.01": ("2.54.0", "10.8.0"),
    "25.02": ("2.55.0", "10.8.0"),
    "25.03": ("2.56.0", "10.9.0"),
    "25.04": ("2.57.0", "10.9.0"),
    "25.05": ("2.58.0", "10.10.0"),
    "25.06": ("2.59.0", "10.11.0"),
    "25.07": ("2.59.1", ""),
    "25.10": ("2.62.0", "10.13.3"),
    "25.11": ("2.63.0", ""),
    "26.01": ("2.65.0", ""),
    "26.03": ("2.67.0", ""),
    "26.04": ("2.68.0", ""),
    "26.05": ("2.69.0", "10.16.1"),
    "26.06": ("2.70.0", ""),
    "26.07": ("2.71.0", "11.1.0"),
    "26.10": ("2.74.0", ""),
}
NEWEST = max(RELEASES)
OLDEST_WITHOUT_FAULTS = "26.07"
"""Of the bulletins in NVIDIA's repository product-security; the last one is 5875."""
LAST_BULLETIN = "8 September 2026"


def triton_in_words(version: str) -> str:
    """Name a Triton version with its release, and say whether NVIDIA has published faults of it.

    version: such as ``2.51.0``.
    """
    release = next((name for name, (triton, _) in RELEASES.items() if triton == version), "")
    name = f"Triton {version}" + (f" (release {release})" if release else "")
    numbers, oldest = (re.findall(r"\d+", text)[:3] for text in (version, RELEASES[OLDEST_WITHOUT_FAULTS][0]))
    if [*map(int, numbers)] < [*map(int, oldest)]:
        return f"{name} has published faults; {OLDEST_WITHOUT_FAULTS} is the oldest release without any"
    return f"{name} has no fault that NVIDIA published up to {LAST_BULLETIN}"
