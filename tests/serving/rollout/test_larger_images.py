"""A rollout to larger images, which clients expect: the gateway changes its buffers and loses no request."""

from __future__ import annotations

import http.client
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from tests.conftest import once
from tests.haproxy import needs_haproxy
from tests.random_bundles import bundle_of, random_vit
from tests.serving.gateways import KEY, key_file
from tests.serving.rollout.checked_load import CheckedLoad
from tests.serving.rollout.state_service import StateService, promoted
from tests.waiting import best_of

pytestmark = [needs_haproxy, pytest.mark.nightly]

WAIT = ("--in-flight", "1", "--queue-timeout", "10000")
"""With a single request at a time, the other clients' requests wait, if they fit into a buffer."""


@pytest.fixture(scope="module")
def larger(shared: Path) -> Bundle:
    """A ViT for images of 256×256: 196,608 bytes, more than the buffers of a gateway for 32×32."""

    def make(out: Path) -> None:
        bundle_of(random_vit(depth=1, image_size=256, patch_size=32), out.parent, name=out.name)

    return once(shared / "pixels_256", partial(make))


def load(service: StateService, bundle: Bundle, rate: float) -> CheckedLoad:
    pixels, logits = bundle.golden()
    where = service.where
    return CheckedLoad(where["grpc"], where["http"], KEY, pixels, {bundle.sha256: logits}, rate)


@pytest.mark.integration
def test_larger_images_wait_after_their_bundle_was_promoted(bundle: Bundle, larger: Bundle, tmp_path: Path) -> None:
    assert open_bundle(larger.path).manifest.image.tensor_shape == (3, 256, 256)
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(photo)
    with StateService(tmp_path, key_file(tmp_path), str(bundle.path), *WAIT) as service:
        with load(service, bundle, rate=60) as clients:
            clients.await_more(5)
            # Refused after the gateway has changed for both bundles, so it changes back.
            order = {"bundle": str(larger.path), "allow_contract_change": True}
            refused = service.order(**order, images=[str(photo)] * 3, agreement=1.0)
            clients.await_more(5)
        assert "the same label as the old server" in refused["error"]
        assert (clients.lost, clients.wrong) == ([], [])
        assert "done" in service.order(**order)
        assert promoted(service) == larger.sha256
        with load(service, larger, rate=1e9) as clients:
            clients.await_more(30)
        assert (clients.lost[:3], clients.wrong) == ([], [])
        assert stopped_s(service) > 0
    sizes = re.findall(r"buffers of (\d+) bytes", (tmp_path / "service.log").read_text())
    assert sizes == ["245760", "131072", "245760"]


def stopped_s(service: StateService) -> float:
    """Return the seconds of an exit while a client keeps an idle connection open."""
    parts = urlsplit(service.where["http"])
    idle = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    idle.request("GET", "/v2/health/ready")
    assert idle.getresponse().read() == b""
    started = time.monotonic()
    assert service.stop() == 0
    return time.monotonic() - started


@pytest.mark.alone
@pytest.mark.integration
def test_an_idle_connection_does_not_hold_up_the_exit(bundle: Bundle, tmp_path: Path) -> None:

    def measured_s() -> float:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        with StateService(folder, key_file(folder), str(bundle.path)) as service:
            return stopped_s(service)

    assert best_of(3, measured_s, enough=15) < 15
