from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.checkpoints.reading import SPEC_METADATA_KEY
from gmmvit_deploy.errors import CheckpointError, InputError, SpecError
from gmmvit_deploy.models.families.vit.model import ViT
from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.scores.masks import ClosedFormGaussianMask
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec, spec_to_json
from tests.conftest import GOLDEN, MANIFEST, RELEASED, Golden, golden

State = dict[str, torch.Tensor]


def released_state(name: str = "vit_gmm") -> State:
    loaded = torch.load(GOLDEN / f"{name}.pth", weights_only=True)
    return dict(loaded.get("model_state_dict", loaded))


def saved(folder: Path, state: Any, name: str = "model.pth") -> Path:
    torch.save(state, folder / name)
    return folder / name


def test_family_mask_size_and_classes_are_read_off_the_file(each_golden: Golden) -> None:
    entry = MANIFEST[each_golden.name]
    spec = load_checkpoint(each_golden.path, each_golden.hints).spec
    assert (spec.family, spec.mask.kind) == (entry["family"], entry["mask"])
    assert (spec.image_size, spec.classes) == (entry["config"]["img_size"], entry["config"]["num_classes"])
    assert spec.mask.kernels == (entry["config"]["num_kernals"] if entry["mask"] == "gmm" else 0)
    assert not spec.mask.shared


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("name", [name for name in RELEASED if MANIFEST[name]["family"] != "vit"])
def test_sizes_of_the_other_families_are_read_off_the_file(name: str) -> None:
    config, spec = MANIFEST[name]["config"], load_checkpoint(golden(name).path, golden(name).hints).spec
    expected = {
        "dim": config.get("dim", config.get("embed_dim")),
        "heads": config.get("heads", config.get("num_heads")),
        "depths" if hasattr(spec, "depths") else "depth": config.get("depth", config.get("depths")),
    }
    expected |= {
        ours: config[theirs]
        for ours, theirs in {
            "patch_size": "patch_size",
            "window": "window_size",
            "head_dim": "dim_head",
            "class_depth": "cls_depth",
            "mlp_dim": "mlp_dim",
            "token_dim": "token_dim",
        }.items()
        if theirs in config
    }
    assert {field: _listed(getattr(spec, field)) for field in expected} == {k: _listed(v) for k, v in expected.items()}


@pytest.mark.parametrize("name", [name for name in RELEASED if MANIFEST[name]["family"] == "vit"])
def test_spec_of_a_vit_is_read_off_the_file(name: str) -> None:
    case = golden(name)
    config, spec = MANIFEST[name]["config"], load_checkpoint(case.path, case.hints).spec
    mask = MANIFEST[name]["mask"]
    assert (spec.family, spec.mask.kind) == ("vit", mask)
    assert (spec.image_size, spec.patch_size, spec.classes) == (
        config["img_size"],
        config["patch_size"],
        config["num_classes"],
    )
    assert (spec.dim, spec.depth, spec.heads, spec.head_dim) == (
        config["dim"],
        config["depth"],
        config["heads"],
        config["dim_head"],
    )
    assert spec.mlp_dim == config["dim"] * config["mlp_dim_ratio"]
    assert spec.mask.kernels == (config["num_kernals"] if mask == "gmm" else 0)
    assert spec.class_token == (mask == "plain")


def _bare(state: State, folder: Path) -> Path:
    return saved(folder, state)


def _training(state: State, folder: Path) -> Path:
    training = {"model_state_dict": state, "epoch": 3, "optimizer_state_dict": {"state": {}}, "scheduler": {"t": 1}}
    return saved(folder, training)


def _data_parallel(state: State, folder: Path) -> Path:
    return saved(folder, {"model_state_dict": {f"module.{name}": tensor for name, tensor in state.items()}})


def _safetensors(state: State, folder: Path) -> Path:
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


def _old_format(state: State, folder: Path) -> Path:
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    return folder / "old.pth"


@pytest.mark.parametrize("wrap", [_bare, _training, _data_parallel, _safetensors, _old_format])
def test_every_wrapping_gives_the_same_model(wrap: Callable[[State, Path], Path], tmp_path: Path) -> None:
    loaded = load_checkpoint(wrap(released_state(), tmp_path))
    reference = load_checkpoint(GOLDEN / "vit_gmm.pth")
    assert loaded.spec == reference.spec
    for name, tensor in reference.model.state_dict().items():
        assert loaded.model.state_dict()[name].equal(tensor), name


def test_every_key_is_accounted_for() -> None:
    loaded = load_checkpoint(GOLDEN / "vit_gmm.pth")
    assert set(loaded.unused) == {"mask"}


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

    def test_wrong_heads_give_other_answers_and_no_error(self) -> None:
        case = golden("vit_plain")
        image = torch.from_numpy(case.inputs)
        with torch.inference_mode():
            logits = load_checkpoint(case.path, LoadHints(heads=6)).model(image).numpy()
        assert float(np.abs(logits - case.logits).max()) > 1e-3

    @pytest.mark.parametrize("heads", [5, 49])
    def test_that_do_not_divide(self, heads: int) -> None:
        with pytest.raises(CheckpointError, match=f"is not a multiple of {heads} heads"):
            load_checkpoint(GOLDEN / "vit_plain.pth", LoadHints(heads=heads))

    def test_that_contradict_the_masks(self) -> None:
        with pytest.raises(CheckpointError, match="number of heads in the masks of the file is 3"):
            load_checkpoint(GOLDEN / "vit_gmm.pth", LoadHints(heads=6))

    def test_below_one(self) -> None:
        with pytest.raises(InputError, match="at least 1"):
            LoadHints(heads=0)

    def test_one_head_without_projection_is_known(self) -> None:
        assert load_checkpoint(GOLDEN / "vit_gmm_one_head.pth").spec.heads == 1


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

    def test_gives_other_answers_at_256_tokens(self) -> None:
        case = golden("vit_gmm_256_tokens")
        with torch.inference_mode():
            model = load_checkpoint(case.path, LoadHints(closed_form=True)).model
            logits = model(torch.from_numpy(case.inputs)).numpy()
        assert float(np.abs(logits - case.logits).max()) > 1e-3

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

    def test_unknown(self) -> None:
        with pytest.raises(SpecError, match="is not known"):
            load_checkpoint(GOLDEN / "vit_plain.pth", LoadHints(preset="vit-huge"))

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
        (_drop("mlp_head.1.weight"), r"mlp_head\.1\.weight is missing"),
        (_drop("pos_embedding"), "pos_embedding is missing"),
        (_drop(f"{_BLOCK0}.mask.alpha"), r"alpha is missing"),
        (
            _drop("transformer.layers.1.0.fn.mask.sigma"),
            r"the file has no tensor transformer\.layers\.1\.0\.fn\.mask\.sigma",
        ),
        (_set("stowaway", torch.zeros(3)), r"unknown key stowaway \(3,\)"),
        (_set("mlp_head.0.weight", torch.zeros(7)), r"mlp_head\.0\.weight has shape \(7,\), expected \(48,\)"),
        (
            _set("mlp_head.0.weight", torch.zeros(48, dtype=torch.int32)),
            r"is torch\.int32, expected torch\.float32",
        ),
        (_set(f"{_BLOCK0}.mask.alpha", torch.zeros(5)), "4 dimensions"),
        (
            _set("transformer.layers.1.0.fn.mask.alpha", torch.zeros(5, 3)),
            r"has shape \(5, 3\), expected \(5, 3, 1, 1\)",
        ),
        (_set("transformer.layers.1.0.fn.mask.sigma", torch.zeros(5, 3, 1)), r"expected \(5, 3, 1, 1\)"),
        (_set("pos_embedding", torch.zeros(1, 63, 48)), "square grid"),
        (_set("to_patch_embedding.1.weight", torch.zeros(48, 47)), r"3·p·p"),
        (_set("mlp_head.0.weight", torch.full((48,), float("nan"))), "NaN or infinite"),
        (_set("mlp_head.0.bias", torch.full((48,), float("inf"))), "NaN or infinite"),
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


@pytest.mark.parametrize("name", ["pit_plain", "pit_elm", "t2t_plain", "t2t_elm"])
def test_heads_of_pit_and_t2t_are_asked_for(name: str) -> None:
    with pytest.raises(CheckpointError, match="does not determine the number"):
        load_checkpoint(GOLDEN / f"{name}.pth")


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
        ("cait_gmm", "cls_transformer.layers.0.0.fn.fn.mask.mask", torch.zeros(1), "unknown key cls_transformer"),
        ("pit_gmm", "layers.1.cls_ff.weight", torch.zeros(48, 25), r"expected \(48, 24\)"),
        ("t2t_gmm", "tokens_to_token.attention1.attn.mask.sigma", torch.zeros(5, 1), r"expected \(5, 1, 1, 1\)"),
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


class TestOwnSpec:
    """Safetensors files of ours contain their spec, so hints are not needed again."""

    def path(self, tmp_path: Path, metadata: str) -> Path:
        state = {name: tensor.clone() for name, tensor in released_state("vit_plain").items()}
        save_file(state, tmp_path / "weights.safetensors", metadata={SPEC_METADATA_KEY: metadata})
        return tmp_path / "weights.safetensors"

    def test_gives_the_heads(self, tmp_path: Path) -> None:
        spec = load_checkpoint(GOLDEN / "vit_plain.pth", LoadHints(heads=3)).spec
        assert load_checkpoint(self.path(tmp_path, json.dumps(spec_to_json(spec)))).spec == spec

    @pytest.mark.parametrize("metadata", ["{", "[]", "{}"])
    def test_that_is_broken(self, tmp_path: Path, metadata: str) -> None:
        with pytest.raises(InputError):
            load_checkpoint(self.path(tmp_path, metadata))


def test_a_closed_form_is_refused_where_there_is_no_gaussian_mixture() -> None:
    case = golden("mnist_vit")
    with pytest.raises(
        CheckpointError, match=r"closed_form=yes is for Gaussian mixture masks, and naive_vit has no such mask"
    ):
        load_checkpoint(case.path, replace(case.hints, closed_form=True))
