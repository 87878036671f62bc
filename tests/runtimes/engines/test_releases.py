"""What is said of a Triton version: its release, and whether NVIDIA has published faults of it."""

from __future__ import annotations

import pytest

from gmmvit_deploy.runtimes.engines.releases import OLDEST_WITHOUT_FAULTS, RELEASES, triton_in_words
from gmmvit_deploy.serving.server_wheel import TRITON


@pytest.mark.parametrize(
    ("version", "name", "faults"),
    [
        (TRITON, "Triton 2.51.0 (release 24.10)", True),
        ("2.59.1", "Triton 2.59.1 (release 25.07)", True),
        ("2.70.9", "Triton 2.70.9 has", True),
        (RELEASES[OLDEST_WITHOUT_FAULTS][0], f"Triton 2.71.0 (release {OLDEST_WITHOUT_FAULTS})", False),
        ("2.100.0dev", "Triton 2.100.0dev has", False),
        ("3.0.0", "Triton 3.0.0 has", False),
    ],
)
def test_versions_before_the_oldest_release_without_faults_have_some(version: str, name: str, faults: bool) -> None:
    words = triton_in_words(version)
    assert words.startswith(name)
    assert ("has published faults" in words, "has no fault" in words) == (faults, not faults)
