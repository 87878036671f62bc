"""vit-pytorch's networks: golden logits in float64, both styles of names, questions, refusals, folds and mistakes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families import model_from_spec, spec_from_json
from gmmvit_deploy.models.families.cait import CaiTSpec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.families.vit_pytorch import VIT_PYTORCH, VitPytorchSpec
from gmmvit_deploy.models.families.vit_pytorch.folding import centre_head_mixing, merge_head_norm_into_values
from gmmvit_deploy.models.families.vit_pytorch.model import VitPytorch
from gmmvit_deploy.models.folding.fold import fold, fold_for_engines
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import spec_to_json
from tests.conftest import Golden, golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import tensors_of
from tests.models.families.small_specs import small_spec

SMALL = small_spec("vit_pytorch")
assert isinstance(SMALL, VitPytorchSpec)
State = dict[str, torch.Tensor]


def saved(folder: Path, state: State) -> Path:
    torch.save(state, folder / "file.pt")
    return folder / "file.pt"


def renamed(state: State, *pairs: tuple[str, str]) -> State:
    """Replace the first of the given parts that each name contains."""

    def other(name: str) -> str:
        for old, new in pairs:
            if old in name:
                return name.replace(old, new)
        return name

    return {other(name): tensor for name, tensor in state.items()}


def logits64(model: Model, case: Golden) -> np.ndarray:
    return exact_logits(model, case.inputs)


def require_golden(loaded: LoadedCheckpoint, case: Golden) -> None:
    np.testing.assert_allclose(logits64(loaded.model, case), case.exact, rtol=0, atol=1e-12)


# ---- names ---------------------------------------------------------------------------------------------------------

INSIDE_TO_PRENORM = (
    (".0.to_", ".0.fn.to_"),
    (".0.temperature", ".0.fn.temperature"),
    (".1.net.0.", ".1.norm."),
    (".1.net.1.", ".1.fn.net.0."),
    (".1.net.4.", ".1.fn.net.3."),
)


def test_vit_of_an_earlier_release(tmp_path: Path) -> None:
    """A class token and positions with the dimension of the batch: the file no longer shows the pooling."""
    case, state = golden("vp_vit"), tensors_of("vp_vit")
    state |= {name: state[name][None] for name in ("cls_token", "pos_embedding")}
    for style in (state, renamed(state, *INSIDE_TO_PRENORM)):
        path = saved(tmp_path, style)
        with pytest.raises(CheckpointError, match="what the classifier reads"):
            load_checkpoint(path, case.hints)
        require_golden(load_checkpoint(path, replace(case.hints, pool="cls")), case)
        other = load_checkpoint(path, replace(case.hints, pool="mean"))
        assert np.abs(logits64(other.model, case) - case.exact).max() > 1e-2


def test_the_latest_vit_without_class_token(tmp_path: Path) -> None:
    state = tensors_of("vp_vit")
    state |= {"cls_token": torch.zeros(0, 40), "pos_embedding": state["pos_embedding"][1:].clone()}
    loaded = load_checkpoint(saved(tmp_path, state), LoadHints(heads=4))
    spec = loaded.spec
    assert isinstance(spec, VitPytorchSpec)
    assert (spec.class_token, spec.pool, spec.tokens) == (False, "mean", 16)
    assert loaded.unused == {"cls_token": "an empty class token: the network has no class token"}
    assert VIT_PYTORCH.last_block(spec) is None  # the final norm does not commute with the mean
    with pytest.raises(
        CheckpointError, match="--set pool=cls, but the file has no class token, so the pooling is mean"
    ):
        load_checkpoint(tmp_path / "file.pt", LoadHints(heads=4, pool="cls"))


def test_a_single_head_of_the_full_width_has_no_output_projection(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tensors_of("vp_vit").items() if ".to_out." not in name}
    state |= {name: torch.randn(120, 40) for name in state if name.endswith("to_qkv.weight")}
    loaded = load_checkpoint(saved(tmp_path, state))
    assert isinstance(loaded.spec, VitPytorchSpec)
    assert (loaded.spec.heads, loaded.spec.output) == (1, "absent")
    with pytest.raises(CheckpointError, match="--set heads=2, but the file has no output projection"):
        load_checkpoint(tmp_path / "file.pt", LoadHints(heads=2))


# ---- files with the names of the paper authors' code ---------------------------------------------------------------


def plain_vit(folder: Path) -> tuple[Path, Golden]:
    state = tensors_of("vit_plain")
    del state["mask"]
    return saved(folder, state), golden("vit_plain")


def test_a_plain_vit_without_root_mask_needs_the_pooling(tmp_path: Path) -> None:
    path, case = plain_vit(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor of this file shows what the classifier reads") as caught:
        load_checkpoint(path, case.hints)
    assert caught.value.hint.startswith("type --set pool=cls or --set pool=mean")
    for hints in (replace(case.hints, pool="cls"), replace(case.hints, source="spt-lsa")):
        assert_same_logits(logits64(load_checkpoint(path, hints).model, case), case.exact)
    with pytest.raises(CheckpointError, match="--set pool=mean, but the pooling of --set source=spt-lsa is cls"):
        load_checkpoint(path, replace(case.hints, source="spt-lsa", pool="mean"))
    with pytest.raises(CheckpointError, match="--set pool=mean, but the tensor mask shows the paper authors' code"):
        load_checkpoint(case.path, replace(case.hints, pool="mean"))
    with pytest.raises(CheckpointError, match="--set pool=cls, but the file has no class token"):
        load_checkpoint(golden("vit_gmm").path, LoadHints(pool="cls"))


def test_a_prenorm_vit_pools_all_tokens(tmp_path: Path) -> None:
    path, case = plain_vit(tmp_path)
    loaded = load_checkpoint(path, replace(case.hints, pool="mean", source="vit-pytorch"))
    spec = loaded.spec
    assert isinstance(spec, ViTSpec)
    assert spec.pools_all
    assert spec_from_json(spec_to_json(spec)) == spec
    tokens: list[torch.Tensor] = []
    by_class_token: Any = load_checkpoint(path, replace(case.hints, source="spt-lsa")).model  # whose logits are golden
    by_class_token.blocks[-1].register_forward_hook(lambda _, __, out: tokens.append(out))
    assert_same_logits(logits64(by_class_token, case), case.exact)
    with torch.inference_mode():
        head_norm, head = by_class_token.double().head_norm, by_class_token.head
        expected = head(head_norm(tokens[-1].mean(1))).numpy()
    np.testing.assert_allclose(logits64(loaded.model, case), expected, rtol=0, atol=1e-11)
    folded = fold(loaded.model)
    assert folded.passes["narrow_last_block"] == (f"blocks.{spec.depth - 1}",)
    np.testing.assert_allclose(logits64(folded.model, case), expected, rtol=0, atol=1e-5)


def test_a_plain_cait_without_root_mask_needs_the_source(tmp_path: Path) -> None:
    case, state = golden("cait_plain"), tensors_of("cait_plain")
    del state["mask"]
    path = saved(tmp_path, state)
    with pytest.raises(CheckpointError, match="the CaiT of SPT_LSA and of vit-pytorch's CaiT in the PreNorm") as caught:
        load_checkpoint(path, case.hints)
    assert caught.value.hint.startswith("type --set source=spt-lsa or --set source=vit-pytorch")
    released = logits64(load_checkpoint(case.path, case.hints).model, case)
    same = load_checkpoint(path, replace(case.hints, source="spt-lsa"))
    np.testing.assert_array_equal(logits64(same.model, case), released)
    other = load_checkpoint(path, replace(case.hints, source="vit-pytorch"))
    assert isinstance(other.spec, CaiTSpec)
    assert other.spec.attends_to_itself
    assert other.taken_from["source"] == "--set source=vit-pytorch"
    assert np.abs(logits64(other.model, case) - released).max() > 1e-3


# ---- questions and refusals ----------------------------------------------------------------------------------------


def test_channels_are_asked_for_if_several_numbers_fit(tmp_path: Path) -> None:
    state = tensors_of("vp_deepvit_prenorm")
    first = "module.to_patch_embedding.1.weight"
    path = saved(tmp_path, state | {first: state[first][:, :64].clone()})  # 64 = 1·8·8 = 4·4·4
    with pytest.raises(CheckpointError, match="no tensor of this file shows the channels") as caught:
        load_checkpoint(path, LoadHints(pool="cls"))
    assert "type --set channels" in caught.value.hint
    assert load_checkpoint(path, LoadHints(pool="cls", channels=1)).spec.image_size == 32
    assert load_checkpoint(path, LoadHints(pool="cls", channels=4)).spec.image_size == 16
    assert load_checkpoint(path, LoadHints(pool="cls", image_size=16)).spec.channels == 4
    path = saved(tmp_path, state | {first: state[first][:, :60].clone()})
    with pytest.raises(CheckpointError, match=r"takes 60 values of a patch of the image; expected c·p·p"):
        load_checkpoint(path, LoadHints(pool="cls"))


def test_positions_that_are_no_square_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, tensors_of("vp_cait") | {"pos_embedding": torch.zeros(1, 17, 40)})
    with pytest.raises(CheckpointError, match="pos_embedding has 17 positions; expected a square grid"):
        load_checkpoint(path, golden("vp_cait").hints)


# ---- folding -------------------------------------------------------------------------------------------------------


def deepvit(**changes: torch.Tensor) -> VitPytorch:
    torch.manual_seed(3)
    model = model_from_spec(SMALL).double().eval()
    assert isinstance(model, VitPytorch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
            if name.endswith("after.norm.weight") and "weight" in changes:
                parameter.copy_(changes["weight"])
    return model


def outputs(model: Model) -> torch.Tensor:
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: torch.Tensor = model(images)
    return logits


@pytest.mark.parametrize("weight", [[1.0, 1e-4], [0.0, 0.0]], ids=["small", "all zero"])
def test_a_vanishing_weight_of_the_head_norm_stays(weight: list[float]) -> None:
    model = deepvit(weight=torch.tensor(weight))
    before = outputs(model)
    centre_head_mixing(model)
    assert merge_head_norm_into_values(model) == ()
    assert_same_logits(outputs(model), before)


def test_heads_without_bias_in_the_output_are_padded() -> None:
    spec = replace(
        SMALL, attention="plain", output="no bias", class_token=False, stored_positions=False, heads=4, head_dim=6
    )
    torch.manual_seed(0)
    folded = fold(model_from_spec(spec).eval())
    wide = fold_for_engines(folded)
    assert wide.passes["pad_heads"]
    assert_same_logits(outputs(wide.model.double()), outputs(copy.deepcopy(folded.model).double()))
