"""A server counts each answer once, whichever way it was asked, and the page shows the counts beside those recorded."""

from __future__ import annotations

import runpy
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import httpx
import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.inference.answer_counts import count_answers
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.serving._metric_text import samples_in
from gmmvit_deploy.serving.front.options import FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.browser import open_chromium
from tests.choices import chosen_bundle
from tests.conftest import FREE_PORTS
from tests.inference.test_preprocess import encoded, photo
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def counting(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose bundle records the answers on the judging images."""
    folder = tmp_path_factory.mktemp("counting")
    chosen = chosen_bundle(bundle, folder / "bundle", "onnxruntime")
    repository_from_bundle(chosen, folder / "models", RepositoryOptions(name="shop"))
    with TritonServer(folder / "models", options=ServerOptions(**FREE_PORTS)) as server:
        yield server


def counted(server: TritonServer, name: str = "gmmvit_answers_total") -> dict[str, dict[str, float]]:
    """Kind → bucket → value."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for labels, value in samples_in(httpx.get(server.metrics_url, trust_env=False).text, name):
        assert labels["model"] == "shop"
        found[labels["kind"]][labels["bucket"]] = value
    return found


def test_each_answer_counts_once_and_the_gateways_check_does_not(bundle: Bundle, counting: TritonServer) -> None:
    files = [encoded(photo(40, 30 + number), "PNG") for number in range(3)]
    images = np.array([[file] for file in files], object)
    with open_runner("triton-grpc", bundle, url=counting.grpc_url, model="shop") as runner:
        infer = runner.server.connection.infer_all  # type: ignore[attr-defined]
        (logits,) = infer("shop", "IMAGE", images, outputs=("logits",))
        infer("shop_classify", "IMAGE", images[:2], outputs=("label",))
    with FrontProcess(FrontOptions(triton_url=counting.http_url, models=("shop",)), None) as front:
        front.wait_ready()
        httpx.post(f"{front.url}/classify", content=files[0], timeout=30, trust_env=False).raise_for_status()
    (check,) = counting.models.health
    httpx.post(f"{counting.http_url}{check.path}", content=check.body, trust_env=False).raise_for_status()
    expected = count_answers(np.concatenate([logits, logits[:2], logits[:1]]), bundle.manifest.label_set)
    wait_until(lambda: sum(counted(counting)["class"].values()) >= 6, "the counts", within_s=10)
    time.sleep(1.5)  # counts once more
    found = counted(counting)
    assert {(kind, bucket): n for kind, buckets in found.items() for bucket, n in buckets.items() if n} == dict(
        expected
    )
    assert found.keys() == {"probability", "margin", "class"}
    assert all(sum(buckets.values()) == 6 for buckets in found.values())
    shares = counted(counting, "gmmvit_expected_answers_ratio")
    assert shares == {"probability": {"0.2-0.4": 0.6, "0.9-0.95": 0.4}, "margin": {"0-0.5": 1.0}}


def test_the_page_shows_them_beside_the_shares_of_the_judging_images(counting: TritonServer) -> None:
    options = FrontOptions(triton_url=counting.http_url, metrics_url=counting.metrics_url, models=("shop",))
    image = encoded(photo(40, 30), "PNG")
    with FrontProcess(options, None) as front, open_chromium() as browser:
        front.wait_ready()
        page = browser.new_page()
        page.goto(front.url)
        page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": image})
        page.wait_for_selector("#answer table")
        page.click("summary")
        page.wait_for_selector("#counted table")
        heads = [table.all_inner_texts() for table in page.locator("#counted table").all()]
        assert len(heads) == 3, heads
        assert "Judging images" in page.locator("#counted thead").first.inner_text()
        row = page.locator("#counted tbody tr", has_text="0.9-0.95").inner_text()
        assert row.split()[-2:] == ["40.0", "%"]


class Family:
    """In place of Triton's: keeps the values of its metrics by bucket."""

    COUNTER, GAUGE = "counter", "gauge"
    of_classes: ClassVar[Counter[str]] = Counter()

    def __init__(self, **_: str) -> None:
        """Take name, description and kind."""

    def Metric(self, labels: dict[str, str]) -> SimpleNamespace:
        def increment(number: int) -> None:
            if labels["kind"] == "class":
                self.of_classes[labels["bucket"]] += number

        return SimpleNamespace(increment=increment)


def test_at_most_100_classes_have_a_series_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(MetricFamily=Family))
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = runpy.run_path(str(Path(__file__).parents[2] / "model_repository" / "gmmvit_network" / "1" / "model.py"))
    labels = LabelSet(labels=tuple(map(str, range(150))))
    answers = model["_Answers"]("shop", labels, {})
    logits = np.eye(150, dtype=np.float32)
    for images in (logits[:102], logits[90:]):
        answers.count(images)
    answers.close()
    own = {str(index): 1 for index in range(90)} | {str(index): 2 for index in range(90, 100)}
    assert Family.of_classes == {**own, "(other classes)": 2 + 50}
