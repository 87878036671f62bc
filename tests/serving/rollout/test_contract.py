"""What a new bundle must have in common with the served bundle, each promise broken in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, Manifest
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.rollout._checks import contract_changes, require_same_contract

pytestmark = pytest.mark.integration


class _Changed:
    """A manifest with other values; `Manifest` itself refuses values that contradict its spec."""

    def __init__(self, manifest: Manifest, **values: Any) -> None:
        self._manifest, self._values = manifest, values

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name, getattr(self._manifest, name))


BROKEN: dict[str, tuple[Callable[[Manifest], dict[str, Any]], str]] = {
    "a renamed class": (
        lambda old: {"labels": (*old.labels[:3], "zebra", *old.labels[4:])},
        "labels: class 3 is 'cat' in the served bundle and 'zebra' in the new bundle",
    ),
    "exchanged classes": (
        lambda old: {"labels": (old.labels[1], old.labels[0], *old.labels[2:])},
        "and 1 other classes differ",
    ),
    "fewer classes": (lambda old: {"labels": old.labels[:-1]}, "the served bundle has 10, the new bundle has 9"),
    "a larger image": (
        lambda old: {"image": replace(old.image, height=64, width=64)},
        "32×32 pixels with 3 channels, the new bundle has 64×64 pixels",
    ),
    "a smaller batch": (lambda old: {"max_batch": old.max_batch - 1}, "largest batch: the served bundle takes 8"),
    "no preprocessing": (lambda old: {"image": replace(old.image, mean=None, std=None)}, "encoded images: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_named(name: str, bundle: Bundle) -> None:
    changes, sentence = BROKEN[name]
    (change,) = contract_changes(bundle.manifest, _Changed(bundle.manifest, **changes(bundle.manifest)))  # type: ignore[arg-type]
    assert sentence in change


def test_a_larger_batch_breaks_no_promise(bundle: Bundle) -> None:
    larger = replace(bundle.manifest, max_batch=bundle.manifest.max_batch + 1)
    assert contract_changes(bundle.manifest, larger) == ()
    require_same_contract(bundle, bundle)


def test_the_error_lists_the_changes_and_how_to_allow_them(bundle: Bundle, tensor_bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"clients of the served bundle [0-9a-f]{12} would notice") as caught:
        require_same_contract(bundle, tensor_bundle)
    assert "input type: the served bundle has pixels, the new bundle has tensor" in str(caught.value)
    assert "--allow-contract-change" in caught.value.hint
