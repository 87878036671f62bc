from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit.model import ViT
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.scores.masks import ClosedFormGaussianMask
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from tests.conftest import GOLDEN, MANIFEST, Golden, golden
from tests.golden_files import tensors_of
from tests.models.families.test_families import cait_specs, pit_specs, swin_specs, t2t_specs, vit_specs

State = dict[str, torch.Tensor]


def released_state(name: str = "vit_gmm") -> State:
    return tensors_of(name)


def saved(folder: Path, state: Any, name: str = "model.pth") -> Path:
    torch.save(state, folder / name)
    return folder / name


def test_what_we_write_is_what_the_released_code_writes(each_golden: Golden) -> None:
    state = released_state(each_golden.name)
    loaded = load_checkpoint(each_golden.path, each_golden.hints)
    written = released_state_dict(loaded.model)
    assert (
        set(written) == set(state) - set(loaded.unused) - {name for name in state if name.startswith("module.")}
        or each_golden.name == "vit_gmm_img64"
    )
    for name, tensor in written.items():
        stored = state[name] if name in state else state[f"module.{name}"]
        assert tensor.shape == stored.shape, name
        assert tensor.equal(stored), name


class TestHeads:
    def test_asked_for_where_the_file_cannot_tell(self) -> None:
        with pytest.raises(CheckpointError, match="does not determine the number") as caught:
            load_checkpoint(GOLDEN / "vit_plain.pth")
        assert "--set heads" in caught.value.hint

    def test_that_do_not_divide(self) -> None:
        with pytest.raises(CheckpointError, match="is not a multiple of 5 heads"):
            load_checkpoint(GOLDEN / "vit_plain.pth", LoadHints(heads=5))

    def test_that_contradict_the_masks(self) -> None:
        with pytest.raises(CheckpointError, match="number of heads in the masks of the file is 3"):
            load_checkpoint(GOLDEN / "vit_gmm.pth", LoadHints(heads=6))


class TestSharedMask:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        state = released_state()
        for name in list(state):
            if name.endswith((".alpha", ".sigma")):
                state[name] = state[name][:, :1].clone()
        return saved(tmp_path, state)

    def test_needs_heads(self, path: Path) -> None:
        with pytest.raises(CheckpointError, match="does not determine the number"):
            load_checkpoint(path)

    def test_is_one_mask_for_all(self, path: Path) -> None:
        loaded = load_checkpoint(path, LoadHints(heads=3))
        assert loaded.spec.mask.shared
        assert loaded.trainable_parameters == 62548 - 3 * 2 * 5 * 2


class TestClosedForm:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return saved(
            tmp_path, {name: tensor for name, tensor in released_state().items() if not name.endswith("mask.mask")}
        )

    def test_is_never_guessed(self, path: Path) -> None:
        with pytest.raises(CheckpointError, match="stored base mask, is missing") as caught:
            load_checkpoint(path)
        assert "--set closed_form=yes" in caught.value.hint

    def test_is_taken_when_the_hints_ask_for_it(self, path: Path) -> None:
        loaded = load_checkpoint(path, LoadHints(closed_form=True))
        assert loaded.spec.mask.closed_form
        assert isinstance(loaded.model.blocks[0].attention.scores.before.mask, ClosedFormGaussianMask)

    def test_leaves_a_stored_base_unused(self) -> None:
        loaded = load_checkpoint(GOLDEN / "vit_gmm_256_tokens.pth", LoadHints(closed_form=True))
        assert any(name.endswith("fn.mask.mask") for name in loaded.unused)

    def test_of_an_elm_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="no alpha and sigma"):
            load_checkpoint(GOLDEN / "vit_elm.pth", LoadHints(heads=3, closed_form=True))


class TestPreset:
    def spec(self, mask: MaskSpec) -> ViTSpec:
        return ViTSpec(
            image_size=32,
            patch_size=4,
            classes=10,
            dim=192,
            depth=9,
            heads=12,
            head_dim=16,
            mlp_dim=384,
            class_token=mask.kind == "plain",
            mask=mask,
        )

    def test_gives_the_heads(self, tmp_path: Path) -> None:
        path = saved(tmp_path, released_state_dict(ViT(self.spec(MaskSpec(kind="elm")))))
        assert load_checkpoint(path, LoadHints(preset="vit")).spec.heads == 12

    def test_that_does_not_fit_lists_what_differs(self) -> None:
        with pytest.raises(CheckpointError, match=r"does not match the preset vit: .*dim 48 \(the preset has 192\)"):
            load_checkpoint(GOLDEN / "vit_gmm.pth", LoadHints(preset="vit"))

    def test_against_heads(self, tmp_path: Path) -> None:
        path = saved(tmp_path, released_state_dict(ViT(self.spec(MaskSpec()))))
        with pytest.raises(CheckpointError, match="--set heads=6, but the preset has 12"):
            load_checkpoint(path, LoadHints(preset="vit", heads=6, pool="cls"))


def _drop(name: str) -> Callable[[State], None]:
    return lambda state: state.__delitem__(name)


def _set(name: str, tensor: torch.Tensor) -> Callable[[State], None]:
    return lambda state: state.__setitem__(name, tensor)


_BLOCK0 = "transformer.layers.0.0.fn"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop("transformer.layers.1.1.norm.bias"), r"the file has no tensor transformer\.layers\.1\.1\.norm\.bias"),
        (_drop("to_patch_embedding.1.weight"), "unknown architecture"),
        (_drop(f"{_BLOCK0}.mask.alpha"), r"alpha is missing"),
        (_set(f"{_BLOCK0}.mask.alpha", torch.zeros(5)), "4 dimensions"),
        (
            _set("transformer.layers.1.0.fn.mask.alpha", torch.zeros(5, 3)),
            r"has shape \(5, 3\), expected \(5, 3, 1, 1\)",
        ),
        (_set("pos_embedding", torch.zeros(1, 63, 48)), "square grid"),
        (_set("to_patch_embedding.1.weight", torch.zeros(48, 47)), r"3·p·p"),
        (_set("cls_token", torch.zeros(1, 1, 48)), "square grid"),
    ],
)
def test_keys_that_do_not_fit_are_named(damage: Callable[[State], None], message: str, tmp_path: Path) -> None:
    state = released_state()
    damage(state)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(saved(tmp_path, state))
    assert "model.pth" in str(caught.value)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"conv1.weight": torch.zeros(64, 3, 7, 7), "fc.bias": torch.zeros(10)})
    with pytest.raises(CheckpointError, match=r"the first keys of the file are conv1\.weight") as caught:
        load_checkpoint(path)
    assert "--model with timm's name of the architecture" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "heads", "evidence"),
    [
        ("swin_plain", 6, "position bias table of the file is 3"),
        ("cait_plain", 8, "mixing matrices of the file is 4"),
        ("pit_gmm", 4, "first masks of the file is 2"),
        ("t2t_gmm", 8, "masks of the file is 4"),
    ],
)
def test_heads_that_contradict_the_file(name: str, heads: int, evidence: str) -> None:
    with pytest.raises(CheckpointError, match=evidence):
        load_checkpoint(GOLDEN / f"{name}.pth", LoadHints(heads=heads))


@pytest.mark.parametrize(
    ("name", "key", "tensor", "message"),
    [
        ("swin_gmm", "layers.0.blocks.0.attn.relative_position_index", torch.zeros(16, 16), "expected torch.int64"),
        ("swin_gmm", "layers.0.blocks.1.attn_mask", torch.zeros(4, 16, 16), r"expected \(16, 16, 16\)"),
        ("swin_gmm", "layers.1.blocks.0.attn.mask.alpha", torch.zeros(5, 3, 1, 1), r"expected \(5, 6, 1, 1\)"),
        ("swin_plain", "layers.0.blocks.0.attn.mask.mask", torch.zeros(16, 16), "element-wise mask"),
        (
            "swin_gmm",
            "layers.0.blocks.0.attn.relative_position_index",
            torch.full((16, 16), 49),
            "points outside the bias table",
        ),
    ],
)
def test_keys_of_other_families_that_do_not_fit(
    name: str, key: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, {**released_state(name), key: tensor})
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["swin_gmm", "cait_gmm", "pit_gmm", "t2t_gmm"])
@pytest.mark.parametrize("form", ["shared", "closed"])
def test_shared_and_closed_masks_of_other_families(name: str, form: str, tmp_path: Path) -> None:
    state = released_state(name)
    for key in list(state):
        if form == "shared" and key.endswith((".mask.alpha", ".mask.sigma")):
            state[key] = state[key][:, :1].clone()
        if form == "closed" and key.endswith(".mask.mask"):
            del state[key]
    config = MANIFEST[name]["config"]
    heads = config.get("heads", config.get("num_heads"))
    hints = LoadHints(
        heads=heads[0] if isinstance(heads, list) else heads, closed_form=True if form == "closed" else None
    )
    loaded = load_checkpoint(saved(tmp_path, state), hints)
    assert (loaded.spec.mask.shared, loaded.spec.mask.closed_form) == (form == "shared", form == "closed")
    assert loaded.model(torch.zeros(1, 3, 32, 32)).isfinite().all()


def test_a_closed_form_is_refused_where_there_is_no_gaussian_mixture() -> None:
    case = golden("mnist_vit")
    with pytest.raises(
        CheckpointError, match=r"closed_form=yes is for Gaussian mixture masks, and naive_vit has no such mask"
    ):
        load_checkpoint(case.path, replace(case.hints, closed_form=True))


@pytest.mark.nightly
@given(spec=st.one_of(vit_specs(), swin_specs(), cait_specs(), pit_specs(), t2t_specs()), seed=st.integers(0, 2**16))
@settings(max_examples=120, deadline=None)
def test_spec_and_weights_survive(spec: ModelSpec, seed: int) -> None:
    """Any model we can build, saved as the released code saves it, is read back as itself."""
    torch.manual_seed(seed)
    model = model_from_spec(spec).eval()
    heads = spec.heads[0] if isinstance(spec.heads, tuple) else spec.heads
    # The names of a plain ViT and a plain CaiT are also those of vit-pytorch.
    closed_form = True if spec.mask.closed_form else None
    source = "spt-lsa" if spec.mask.kind == "plain" else None
    hints = LoadHints(heads=heads, closed_form=closed_form, source=source)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        torch.save({"model_state_dict": released_state_dict(model)}, path)
        loaded = load_checkpoint(path, hints)
    # With a single head, shared and separate masks look the same in a file.
    alone = set(spec.heads if isinstance(spec.heads, tuple) else (spec.heads,)) == {1}
    assert loaded.spec == replace(spec, mask=replace(spec.mask, shared=spec.mask.shared and not alone))
    expected = model.state_dict()
    restored = loaded.model.state_dict()
    assert restored.keys() == expected.keys()
    assert all(restored[name].equal(expected[name]) for name in expected)
