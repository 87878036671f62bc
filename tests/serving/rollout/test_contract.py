"""What a new bundle must have in common with the served bundle, each promise broken in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, Manifest
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.rollout.contract import contract_changes, require_same_contract

pytestmark = pytest.mark.export


def other(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, **changes)


def test_the_same_bundle_changes_nothing(bundle: Bundle) -> None:
    assert contract_changes(bundle.manifest, bundle.manifest) == ()
    require_same_contract(bundle, bundle)


def test_a_renamed_class_is_named(bundle: Bundle) -> None:
    labels = list(bundle.manifest.labels)
    labels[3] = "zebra"
    (change,) = contract_changes(bundle.manifest, other(bundle.manifest, labels=tuple(labels)))
    assert "class 3 is" in change
    assert "'zebra' in the new bundle" in change


def test_exchanged_classes_are_counted(bundle: Bundle) -> None:
    first, second, *rest = bundle.manifest.labels
    (change,) = contract_changes(bundle.manifest, other(bundle.manifest, labels=(second, first, *rest)))
    assert "and 1 other classes differ" in change


def test_another_number_of_classes_is_named(bundle: Bundle) -> None:
    changes = contract_changes(bundle.manifest, other(bundle.manifest, labels=bundle.manifest.labels[:-1]))
    assert "the served bundle has 10, the new bundle has 9" in changes[0]


def test_another_input_type_is_named(bundle: Bundle, tensor_bundle: Bundle) -> None:
    changes = contract_changes(bundle.manifest, tensor_bundle.manifest)
    assert any(
        change.startswith("input type: the served bundle has pixels, the new bundle has tensor") for change in changes
    )


def test_a_larger_image_is_named(bundle: Bundle) -> None:
    class Larger:
        """The manifest of the same model at 64 × 64 pixels; `Manifest` itself refuses another size than its spec's."""

        def __getattr__(self, name: str) -> Any:
            return (
                replace(bundle.manifest.image, height=64, width=64)
                if name == "image"
                else getattr(bundle.manifest, name)
            )

    changes = contract_changes(bundle.manifest, Larger())  # type: ignore[arg-type]  # stands in for a manifest
    assert any("32×32 pixels with 3 channels, the new bundle has 64×64 pixels" in change for change in changes)


def test_a_smaller_batch_is_a_change_and_a_larger_batch_is_none(bundle: Bundle) -> None:
    smaller = contract_changes(bundle.manifest, other(bundle.manifest, max_batch=bundle.manifest.max_batch - 1))
    assert smaller[0].startswith("largest batch")
    assert contract_changes(bundle.manifest, other(bundle.manifest, max_batch=bundle.manifest.max_batch + 1)) == ()


def test_lost_preprocessing_is_named(tensor_bundle: Bundle) -> None:
    with_norm = tensor_bundle.manifest
    if with_norm.image.normalisation is None:
        pytest.fail("the fixture has no normalisation to take away")
    without = other(with_norm, image=replace(with_norm.image, mean=None, std=None))
    assert any(change.startswith("encoded images") for change in contract_changes(with_norm, without))


def test_the_error_lists_the_changes_and_how_to_allow_them(bundle: Bundle, tensor_bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"clients of the served bundle [0-9a-f]{12} would notice") as caught:
        require_same_contract(bundle, tensor_bundle)
    assert "--allow-contract-change" in caught.value.hint
