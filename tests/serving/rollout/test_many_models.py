"""A rollout exchanges one model of a service, and leaves the others as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.rollout._rollout import served_name
from gmmvit_deploy.serving.rollout.control import send_order
from tests.haproxy import needs_haproxy
from tests.serving.gateways import key_file, request
from tests.serving.rollout.state_service import StateService, load, png, promoted


def test_the_only_model_needs_no_name() -> None:
    assert served_name(None, ["cats"]) == served_name("cats", ["cats", "shop"]) == "cats"


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "the service has several models: cats, shop"), ("dogs", "the service has no model dogs, only cats, shop")],
)
def test_a_name_that_decides_nothing_is_refused(name: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        served_name(name, ["shop", "cats"])
    assert "--name with one of cats, shop" in caught.value.hint


@needs_haproxy
@pytest.mark.integration
@pytest.mark.nightly
def test_one_of_two_models_is_exchanged_under_load_and_goes_back(tmp_path: Path, bundles: dict[str, Bundle]) -> None:
    shop, old, new = bundles["gmm"], bundles["elm"], bundles["gmm"]
    with StateService(tmp_path, key_file(tmp_path), f"shop={shop.path}", f"cats={old.path}") as service:
        assert "several models: cats, shop" in service.order(bundle=str(new.path))["error"]
        with (
            load(service, {"shop": shop}, network="shop_network") as of_shop,
            load(service, {"old": old, "new": new}, network="cats_network") as of_cats,
        ):
            of_shop.await_more(6)
            of_cats.await_more(6)
            assert set(of_cats.answered) == {old.sha256}
            words = ["rollout", str(new.path), "--to", str(service.state), "--name", "cats"]
            typed = subprocess.run(
                [sys.executable, "-m", "gmmvit_cli.main", *words], capture_output=True, text=True, check=True
            )
            assert typed.stdout == f"the service serves bundle {new.sha256} as cats\n"
            require_classified(service, {"shop": shop, "cats": new})
            (status,) = send_order(service.state, {"order": "status"})
            (cats, _) = status["status"]["models"]
            assert (cats["name"], cats["bundle"], cats["before"]) == ("cats", new.sha256, old.sha256)
            assert f"serves bundle {shop.sha256[:12]} as shop" in status["done"]
            of_cats.await_more(6)
            answer = service.order(bundle=cats["before_path"], name="cats")
            assert "done" in answer, answer
            require_classified(service, {"shop": shop, "cats": old})
            of_shop.await_more(6)
            of_cats.await_more(6)
        assert (of_shop.lost, of_shop.wrong, of_cats.lost, of_cats.wrong) == ([], [], [], [])
        assert (set(of_shop.answered), set(of_cats.answered)) == ({shop.sha256}, {old.sha256, new.sha256})
        assert (promoted(service, "shop"), promoted(service, "cats")) == (shop.sha256, old.sha256)
        assert service.stop() == 0
    with StateService(tmp_path, tmp_path / "keys.txt") as service:
        require_classified(service, {"shop": shop, "cats": old})


def require_classified(service: StateService, bundles: dict[str, Bundle]) -> None:
    """Hold the bundles that ``/classify/NAME`` states to those expected."""
    for name, bundle in bundles.items():
        answer = request(service.where["http"], f"/classify/{name}", png())
        assert (answer.status, answer.json()["bundle"]) == (200, bundle.sha256)
