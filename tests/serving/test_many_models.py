"""Several bundles in one service: each answers under its name, and a broken one keeps none of the others down."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.utils

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE, MANIFEST_FILE, Bundle
from gmmvit_deploy.checkpoints.loading import released_state_dict
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier
from gmmvit_deploy.serving.named_bundles import named_paths
from gmmvit_deploy.serving.served_models import read_models
from tests.cli.terminal import gmmvit_here
from tests.conftest import cifar_options, once
from tests.haproxy import needs_haproxy
from tests.inference.test_preprocess import encoded, photo
from tests.serving.commands import Serve
from tests.serving.gateways import BEARER, KEY, OTHER_KEY, key_file
from tests.serving.test_page import shown, visit

IMAGES = [encoded(photo(40, 30, seed=seed), "PNG") for seed in range(2)]


@pytest.fixture(scope="module")
def small(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A classifier of 16×16 pixels with three labels."""
    torch.manual_seed(0)
    spec = ViTSpec(
        image_size=16, patch_size=4, classes=3, dim=32, depth=1, heads=2, head_dim=16, mlp_dim=64, class_token=False,
        mask=MaskSpec(kind="gmm", kernels=3),
    )  # fmt: skip
    checkpoint = tmp_path_factory.mktemp("small") / "checkpoint.pth"
    torch.save({"model_state_dict": released_state_dict(model_from_spec(spec).eval())}, checkpoint)
    options = cifar_options(labels=("ant", "bee", "cow"), max_batch=4)
    return once(shared / "three_labels", lambda out: bundle_from_checkpoint(checkpoint, out, options))


def broken(bundle: Bundle, folder: Path, *, opens: bool) -> Path:
    """Copy a bundle with other reference outputs.  opens: True to state their hash, so that only a server notices."""
    shutil.copytree(bundle.path, folder)
    with np.load(folder / GOLDEN_FILE) as stored:
        arrays = dict(stored)
    np.savez(folder / GOLDEN_FILE, **{**arrays, "logits": arrays["logits"] + 1})
    if opens:
        text = (folder / MANIFEST_FILE).read_text()
        before, after = (sha256_of_file(path / GOLDEN_FILE) for path in (bundle.path, folder))
        assert before in text
        (folder / MANIFEST_FILE).write_text(text.replace(before, after))
    return folder


def asked(url: str, path: str, image: bytes = IMAGES[0], headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(f"{url}{path}", content=image, headers=headers, timeout=30, trust_env=False)


def require_right_answers(url: str, bundles: dict[str, Bundle], headers: dict[str, str] | None = None) -> None:
    for name, bundle in bundles.items():
        with BundleClassifier(bundle) as local:
            computed = local.answers(IMAGES[:1], bundle.manifest.output_names)
        answer = asked(url, f"/{'classify' if bundle.manifest.has_logits else 'embed'}/{name}", headers=headers)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["model"], body["bundle"]) == (name, bundle.sha256)
        if bundle.manifest.has_logits:
            guesses = bundle.manifest.label_set.predictions(computed["logits"][0], min(5, len(bundle.manifest.labels)))
            (row,) = body["predictions"]
            assert [guess["label"] for guess in row] == [guess.label for guess in guesses]
            assert [guess["probability"] for guess in row] == pytest.approx([g.probability for g in guesses], abs=1e-4)
        else:
            features = np.frombuffer(base64.b64decode(body["features"][0]), "<f4")
            assert features == pytest.approx(computed["features"][0], abs=1e-4)


@pytest.fixture(scope="module")
def bundles(bundle: Bundle, features_bundle: Bundle, small: Bundle) -> dict[str, Bundle]:
    return {"shop": bundle, "search": features_bundle, "animals": small}


@pytest.fixture(scope="module")
def service(
    bundles: dict[str, Bundle], small: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("many")
    damaged = broken(small, folder / "damaged", opens=False)
    wrong = broken(small, folder / "wrong", opens=True)
    named = [f"{name}={each.path}" for name, each in bundles.items()]
    with (folder / "stderr").open("w") as errors, Serve(None, *named, damaged, wrong, stderr=errors) as running:
        where = running.ready()
        yield SimpleNamespace(**where, url=where["classify"].removesuffix("/classify"), errors=folder / "stderr")


@pytest.mark.integration
class TestWithoutGateway:
    def test_each_answers_under_its_name(self, service: SimpleNamespace, bundles: dict[str, Bundle]) -> None:
        require_right_answers(service.url, bundles)
        with BundleClassifier(bundles["search"]) as local:
            features = local.answers(IMAGES[:1], ["features"])["features"][0]
        openai = {"model": "search", "input": f"data:image/png;base64,{base64.b64encode(IMAGES[0]).decode()}"}
        answer = httpx.post(f"{service.url}/v1/embeddings", json=openai, timeout=30, trust_env=False)
        assert (answer.status_code, answer.json()["model"]) == (200, "search")
        assert answer.json()["data"][0]["embedding"] == pytest.approx(features, abs=1e-4)
        answer = httpx.post(f"{service.url}/v1/embeddings", json={**openai, "model": "shop"}, trust_env=False)
        assert (answer.status_code, "expected 'search', got 'shop'" in answer.text) == (404, True)

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("/classify", "the path names no model; expected /classify/animals or /classify/shop"),
            ("/embed", "the path names no model; expected /embed/search"),
            ("/classify/dogs", "there is no model 'dogs'; expected /classify/animals or "),
            ("/classify/wrong", "there is no model 'wrong'"),
            ("/classify/shop/more", "there is no such path"),
        ],
    )
    def test_wrong_names(self, path: str, message: str, service: SimpleNamespace) -> None:
        answer = asked(service.url, path)
        assert (answer.status_code, message in answer.json()["error"]) == (404, True), answer.text

    def test_broken_bundles_are_named(self, service: SimpleNamespace, bundles: dict[str, Bundle]) -> None:
        text = service.errors.read_text()
        assert "left out: damaged: " in text
        assert "left out: wrong: wrong_network: " in text
        assert [model["name"] for model in service.models] == sorted(bundles)
        assert {model["bundle"] for model in service.models} == {each.sha256 for each in bundles.values()}

    def test_the_page_lets_choose_among_the_classifiers(
        self, service: SimpleNamespace, small: Bundle, tmp_path: Path
    ) -> None:
        (tmp_path / "photo.png").write_bytes(IMAGES[0])
        front: Any = SimpleNamespace(url=service.url)
        with visit(front) as page:
            assert page.get_by_label("Model").locator("option").all_inner_texts() == ["animals", "shop"]
            page.set_input_files("#file", tmp_path / "photo.png")
            assert {label for label, _ in shown(page)} == set(small.manifest.labels)
            page.get_by_label("Model").select_option("shop")  # sends the image again
            page.locator("#answer", has_text="Model shop").wait_for()
            assert len(shown(page)) == 5


@needs_haproxy
@pytest.mark.integration
@pytest.mark.nightly
def test_behind_a_gateway(bundle: Bundle, small: Bundle, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    keys = key_file(tmp_path, f"tester {KEY}", f"shop {OTHER_KEY} models=embeddings,shoes")
    written = gmmvit_here(
        "repository", f"embeddings={bundle.path}", f"animals={small.path}", "-o", repository, "--json"
    )
    assert written.status == 0, written.err
    assert json.loads(written.out)["runners"].keys() == {"embeddings", "animals"}
    log = tmp_path / "access.log"
    with Serve(repository, "--gateway", "--keys", keys, "--access-log", log) as running:
        where = running.ready()
        require_right_answers(where["http"], {"embeddings": bundle, "animals": small}, BEARER)
        assert asked(where["http"], "/classify/embeddings").status_code == 401
        for path in ("/classify/dogs", "/classify", "/classify/embeddings/more"):
            assert asked(where["http"], path, headers=BEARER).status_code == 404
        only_one = {"Authorization": f"Bearer {OTHER_KEY}"}
        require_right_answers(where["http"], {"embeddings": bundle}, only_one)
        others = ("/classify/animals", "/v2/models/animals/infer", "/v2/models/animals_network/versions/1/infer")
        for path in others:
            assert asked(where["http"], path, headers=only_one).status_code == 403, path
        body = {"model": "animals", "input": ["data:image/png;base64,"]}  # the body names the model, not the path
        for path in ("/v1/embeddings", "/v1/embeddings/"):
            assert httpx.post(f"{where['http']}{path}", json=body, headers=only_one, trust_env=False).status_code == 403
        for path in ("/v2/models/animals/config", "/v2"):
            assert httpx.get(f"{where['http']}{path}", headers=only_one, trust_env=False).status_code == 403, path
        client = httpx.get(f"{where['http']}/v2/models/embeddings/config", headers=only_one, trust_env=False)
        assert client.status_code == 200
        assert httpx.get(where["metrics"], headers=only_one, trust_env=False).status_code == 403
        for name, key, status in (("embeddings", OTHER_KEY, "PERMISSION_DENIED"), ("embeddings", KEY, "OK")):
            assert grpc_ready(where["grpc"], name, key) == status
        ready = httpx.get(f"{where['http']}/v2/health/ready", trust_env=False)
        assert ready.status_code == 200
        running.process.terminate()
        running.end()
    models = [json.loads(line)["model"] for line in log.read_text().splitlines() if '"status":200' in line]
    assert sorted(models[:2]) == ["animals", "embeddings"]


def grpc_ready(url: str, model: str, key: str) -> str:
    """Ask over gRPC whether a model is ready; return the status."""
    client = tritonclient.grpc.InferenceServerClient(url.removeprefix("grpc://"))
    try:
        assert client.is_model_ready(model, headers={"authorization": f"Bearer {key}"})
    except tritonclient.utils.InferenceServerException as exc:
        return str(exc.status()).removeprefix("StatusCode.")
    return "OK"


@pytest.mark.integration
def test_strict_makes_a_broken_bundle_an_error(small: Bundle, tmp_path: Path) -> None:
    damaged = broken(small, tmp_path / "damaged", opens=False)
    answer = gmmvit_here("serve", small.path, damaged, "--strict")
    assert answer.status == 1
    assert f"Error: {damaged}" in answer.err
    answer = gmmvit_here("serve", small.path, tmp_path / "typing-mistake")
    assert (answer.status, "does not exist" in answer.err) == (1, True)
    answer = gmmvit_here("serve", small.path, tmp_path, "--strict")
    assert (answer.status, "has no manifest.json" in answer.err) == (1, True)
    answer = gmmvit_here("serve", small.path, damaged, "--state", tmp_path / "state", "--gateway", "--keys", damaged)
    assert f"Error: {damaged}" in answer.err  # a service with a state leaves no model out


class TestNames:
    def test_of_folders_or_stated(self, tmp_path: Path) -> None:
        (tmp_path / "a=b").mkdir()
        assert named_paths(["some/bundle"]) == {"gmmvit": Path("some/bundle")}
        assert named_paths(["cats=some/bundle"]) == {"cats": Path("some/bundle")}
        assert named_paths(["shop", "cats=some/bundle/"]) == {"shop": Path("shop"), "cats": Path("some/bundle")}
        assert named_paths([str(tmp_path / "a=b")]) == {"gmmvit": tmp_path / "a=b"}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["a/shop", "b/shop"], "a/shop and b/shop have the same name, shop"),
            (["shop", "v1.2"], "v1.2: model name: expected only letters, digits, - and _, got 'v1.2'"),
            (["=shop"], "=shop: model name: expected only letters"),
            (["cats", "cats_network"], "cats_network is also the name of a model of cats"),
        ],
    )
    def test_that_cannot_be_served(self, arguments: list[str], message: str) -> None:
        with pytest.raises(InputError) as caught:
            named_paths(arguments)
        assert message in str(caught.value)
        assert "type NAME=" in caught.value.hint


@pytest.mark.integration
def test_of_a_repository_each_network_is_checked(bundle: Bundle, small: Bundle, tmp_path: Path) -> None:
    assert gmmvit_here("repository", f"a={bundle.path}", f"b={small.path}", "-o", tmp_path / "models").status == 0
    models = read_models(tmp_path / "models")
    assert [check.path for check in models.health] == ["/v2/models/a/infer", "/v2/models/b/ready"]
    assert (models.bundle, [network.bundle for network in models.networks]) == ("", [bundle.sha256, small.sha256])
