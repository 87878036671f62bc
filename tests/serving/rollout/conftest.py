"""Bundles that replace each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from tests.conftest import cifar_options, golden, once


@pytest.fixture(scope="session")
def bundles(shared: Path, bundle: Bundle) -> dict[str, Bundle]:
    """Bundles with the same contract and other weights: gmm and elm; and ``labels``, with two classes exchanged."""
    case = golden("vit_elm")
    labels = list(cifar_options().labels or ())
    labels[0], labels[1] = labels[1], labels[0]
    made = {
        name: once(
            shared / f"pixels_{name}", partial(bundle_from_checkpoint, case.path, options=options, hints=case.hints)
        )
        for name, options in {"elm": cifar_options(), "labels": cifar_options(labels=tuple(labels))}.items()
    }
    return {"gmm": bundle, **made}
