"""A single-channel network on a real Triton server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier, classify_files
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.export.test_channels import LABELS, exported, logits_of_files, photo

pytestmark = pytest.mark.integration


@pytest.mark.nightly
def test_grey_images_get_pytorchs_answers(tmp_path: Path) -> None:
    """PNG files, grey, coloured and with alpha, over gRPC and HTTP → the logits of eager PyTorch."""
    bundle = exported(tmp_path, 1)
    repository = repository_from_bundle(bundle, tmp_path / "models")
    files = []
    for mode in ("L", "RGB", "RGBA"):
        files.append(tmp_path / f"{mode}.png")
        photo(mode).save(files[-1])
    expected = logits_of_files(bundle, files)
    images = np.array([[file.read_bytes()] for file in files], dtype=np.object_)
    with TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as running:
        for url in (running.grpc_url, running.http_url):
            with TritonConnection(url) as connection:
                pixels = connection.infer("gmmvit_preprocess", "IMAGE", images, output="pixels")
                logits = connection.infer("gmmvit", "IMAGE", images)
            assert pixels.shape == (3, 20, 20, 1)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
            with TritonClassifier(url) as classifier:
                answers = classify_files(classifier, files, top=1)
            assert [answer.predictions[0].label for answer in answers] == [LABELS[i] for i in expected.argmax(1)]
            with TritonRunner(bundle, url) as runner:
                report = check_parity(bundle, [runner])
            assert report.passed, report.failures()
