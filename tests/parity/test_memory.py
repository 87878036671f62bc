"""Parity reads a data set image by image: its memory does not grow with the number of images."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from tests.parity.test_faults import labelled_by
from tests.waiting import best_of

_MEASURE = """
import resource, sys
from pathlib import Path
from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.runtimes.runners.open import open_runner

bundle, data = open_bundle(Path(sys.argv[1])), open_data(sys.argv[2])
seen = []
with open_runner("onnxruntime", bundle) as runner:
    for limit in (500, int(sys.argv[3])):
        report = check_parity(
            bundle, [runner], ParityOptions(data=data, limit=limit, on_broken="skip"),
            on_progress=lambda event: seen.append(event.done),
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(report.verdict, report.data["images"], report.data["broken"], peak, max(seen))
"""


@pytest.mark.nightly
def test_ten_thousand_images_in_bounded_memory(bundle: Bundle, tmp_path: Path) -> None:
    """A folder with variations of some images, and a broken image."""
    data = labelled_by(bundle)
    for index in range(10_000):
        pixels = data.pixels(index % len(data), bundle.manifest.image).copy()
        pixels[0, 0, :2] = divmod(index, 256)
        path = tmp_path / "many" / data.classes[data.label(index % len(data))] / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (min((tmp_path / "many").iterdir()) / "broken.png").write_bytes(b"no image")  # not the last of all
    command = [sys.executable, "-c", _MEASURE, str(bundle.path), str(tmp_path / "many"), "10001"]

    def growth_kib() -> int:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        few, many = (line.split() for line in answer.stdout.splitlines())
        assert many[:3] == ["passed", "10000", "1"]  # enough of them for the gate of 99.9 %
        assert int(many[4]) == 10_001  # progress was reported to the end
        return int(many[3]) - int(few[3])

    limit_kib = 32 * 1024  # 10,000 images as float32 alone would be 120 MiB
    assert best_of(3, growth_kib, enough=limit_kib) <= limit_kib
