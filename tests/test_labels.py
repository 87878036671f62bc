from __future__ import annotations

import pytest

from gmmvit_deploy.labels import distinct_names


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("cat", "dog"), ("cat", "dog")),
        (("crane", "hen", "crane"), ("crane (0)", "hen", "crane (2)")),
        (("crane", "crane (0)", "crane"), ("crane (0)", "crane (0) (1)", "crane (2)")),
        ((), ()),
    ],
    ids=["unique", "repeated", "a label that looks like a name", "no labels"],
)
def test_every_class_has_a_name_of_its_own(labels: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert distinct_names(labels) == names
