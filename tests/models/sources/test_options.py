"""Every option is read, by the source of the file, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import CheckpointError, InputError
from gmmvit_deploy.models.families import FAMILIES
from gmmvit_deploy.models.sources.hints import OWN_HINTS, SOURCES, LoadHints, settings_from
from tests.conftest import EACH_FAMILY, MANIFEST, golden

OPTIONS: dict[str, tuple[Any, str]] = {
    "pool": ("cls", "--set pool=cls"),
    "scale_adjustment": (0.5, "--set scale_adjustment=0.5"),
    "transform_scale": (False, "--set transform_scale=no"),
    "decomposed_stages": ((), "--set decomposed_stages=none"),
    "model_args": ({"depth": 2}, "--model-args"),
}
"""Field of `LoadHints` → a value, and the option as the user types it."""
READ = {
    "vit": {"pool"},
    "vit_pytorch": {"pool"},
    "deepvit": {"scale_adjustment", "transform_scale"},
    "rmt": {"decomposed_stages"},
    "timm": {"model_args"},
    "hugging_face": {"pool"},
}
"""Family → the options of `OPTIONS` that its files need or confirm."""
CODES = {"spt_lsa": "spt-lsa", "vit_pytorch": "vit-pytorch"}
"""Folder of golden files → the value of ``--set source`` that names their code."""
PLAIN_WITHOUT_EVIDENCE = "pit_plain"
"""A file without mask, neither in the attentions nor at the root: the code of SPT and LSA also writes such files."""


def test_the_options_are_those_of_the_hints() -> None:
    assert {*OPTIONS} == {*OWN_HINTS}


@pytest.mark.first(8)
@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in EACH_FAMILY for option in OPTIONS if option not in READ.get(golden(name).family, ())],
)
def test_an_option_that_the_source_does_not_read_is_refused(name: str, option: str) -> None:
    case, (value, typed) = golden(name), OPTIONS[option]
    with pytest.raises(CheckpointError, match="does not apply to a file of ") as caught:
        load_checkpoint(case.path, replace(case.hints, **{option: value}))
    assert str(caught.value).startswith(f"{case.path}: {typed} does not apply")
    assert caught.value.hint == f"leave {typed.partition('=')[0]} out"


@pytest.mark.first(3)
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_the_name_of_another_source_is_refused(name: str) -> None:
    case = golden(name)
    right = {CODES.get(case.path.parent.name), "spt-lsa" if name == PLAIN_WITHOUT_EVIDENCE else None}
    for source in {*SOURCES} - right:
        with pytest.raises(CheckpointError, match=f"--set source={source}, but the names of the tensors are") as caught:
            load_checkpoint(case.path, replace(case.hints, source=source))
        assert str(caught.value).startswith(str(case.path))
        assert caught.value.hint == "leave --set source out"


@pytest.mark.first(3)
@pytest.mark.parametrize("name", [name for name in MANIFEST if golden(name).path.parent.name in CODES])
def test_the_name_of_the_source_of_the_file_changes_nothing(name: str) -> None:
    case = golden(name)
    code = CODES[case.path.parent.name]
    plain, named = (load_checkpoint(case.path, replace(case.hints, source=source)) for source in (None, code))
    assert named.spec == plain.spec
    assert named.taken_from == {**plain.taken_from, "source": f"--set source={code}"}


def test_every_source_of_a_family_reads_the_same_options() -> None:
    for family in FAMILIES:
        assert all({*source.own_hints} == READ.get(family.name, set()) for source in family.sources), family.name


@pytest.mark.parametrize("option", [*OPTIONS, "source"])
def test_the_weights_of_a_bundle_need_no_option(option: str, tmp_path: Path) -> None:
    model, path = load_checkpoint(golden("vit_gmm").path).model, tmp_path / "weights.safetensors"
    path.write_bytes(bytes_from_model(model))
    load_checkpoint(path)
    value, typed = OPTIONS.get(option, ("spt-lsa", "--set source=spt-lsa"))
    with pytest.raises(CheckpointError, match=f"{typed} does not apply to a file that holds the spec of the model"):
        load_checkpoint(path, LoadHints(**{option: value}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("heads=4", 4),
        ("decomposed_stages=none", ()),
        ("decomposed_stages=1,2,3", (1, 2, 3)),
        ("scale_adjustment=0.5", 0.5),
        ("transform_scale=no", False),
        ("pool=cls", "cls"),
    ],
)
def test_a_setting_is_read(text: str, value: object) -> None:
    name = text.partition("=")[0]
    hints = LoadHints(**settings_from([text]))
    assert getattr(hints, name) == value
    assert hints.typed()[name] == f"--set {text}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decomposed_stages": (0, 1)}, "decomposed_stages: expected different numbers of at least 1, got 0,1"),
        ({"pool": "max"}, "pool: expected cls or mean or pooler, got 'max'"),
        ({"heads": 0}, "heads: expected a whole number of at least 1, got 0"),
        ({"interpolation": "bicubic"}, "interpolation: expected timm or torchvision or deit or dino, got 'bicubic'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadHints(**values)
