"""Masks on timm's models: `gmmvit_deploy.timm` against the formulas written out here, and the golden checkpoints."""

import copy
import itertools
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gmmvit_deploy.checkpoints.reading import read_tensors
from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.models.layers.masked_attention import MaskedAttention
from gmmvit_deploy.models.layers.token_grids import Placement, placements
from gmmvit_deploy.timm import add_masks, create
from tests.conftest import GOLDEN

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:the mask of .* has no effect")]

GOLDEN_ARGS = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "mlp_ratio": 2}
GOLDEN_MODELS = {
    "timm_vit_gmm": "vit_tiny_patch16_224",
    "timm_deit_distilled_gmm": "deit_tiny_distilled_patch16_224",
    "timm_vit_gmm_mean": "vit_medium_patch16_reg4_gap_256",
}

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
MEAN = {"class_token": False, "global_pool": "avg"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", VIT),
    "not square": ("vit_tiny_patch16_224", {**VIT, **MEAN, "img_size": (8, 20)}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", VIT),
    "registers, qk norm": ("vit_tiny_patch16_224", {**VIT, "reg_tokens": 4, "qk_norm": True, "global_pool": "avg"}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "num_classes": 5},
    ),
    "beit": ("beit_base_patch16_224", VIT),
    "eva02, rotation": ("eva02_tiny_patch14_224", VIT),
    "vit, rotation": ("vit_small_patch16_rope_224", {**VIT, "embed_dim": 32}),
    "relative positions": ("vit_relpos_small_patch16_224", VIT),
    "pit": (
        "pit_ti_224",
        {
            "img_size": 32,
            "patch_size": 8,
            "stride": 4,
            "base_dims": (8, 8, 8),
            "depth": (1, 1, 1),
            "heads": (1, 2, 2),
            "num_classes": 5,
        },
    ),
    "maxvit": (
        "maxvit_rmlp_pico_rw_256",
        {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 32), "stem_width": 8, "num_classes": 5},
    ),
}
each_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, **mask: Any) -> nn.Module:
    """Return a masked model in evaluation mode, with weights large enough for attention that is not uniform."""
    torch.manual_seed(0)
    architecture, model_args = MODELS[name]
    model = create(architecture, **{"kernels": 3, **mask}, **model_args)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ".mask." not in path:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def images(name: str, count: int = 2) -> Tensor:
    size = MODELS[name][1]["img_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def unmasked(name: str, masked: nn.Module) -> nn.Module:
    """Return timm's own model with the weights of ``masked``, without the tensors of the masks."""
    architecture, model_args = MODELS[name]
    model: nn.Module = timm.create_model(architecture, **model_args)
    model.load_state_dict({k: v for k, v in masked.state_dict().items() if ".attn.mask." not in k})
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    return model.eval()


def offset(i: int, j: int, place: Placement) -> tuple[int, int]:
    columns = place.grid[1]
    return i // columns - j // columns, i % columns - j % columns


def mixture(alpha: Tensor, sigma: Tensor, place: Placement) -> Tensor:
    """Return M (H, N, N) of the closed form, entry by entry as the paper writes it."""
    n, prefix = place.tokens, place.prefix
    matrix = torch.ones(place.heads, n, n, dtype=alpha.dtype)
    for i, j in itertools.product(range(n - prefix), repeat=2):
        down, right = offset(i, j, place)
        gauss = alpha * torch.exp(-(down**2 + right**2) / (2 * sigma**2 + 2e-5))
        matrix[:, prefix + i, prefix + j] = gauss.sum(0)[:, 0, 0]
    return matrix


class WrittenOut(TorchFunctionMode):
    """Compute the fused attention function with the next of ``factors`` and the next of ``terms``."""

    def __init__(self, factors: Iterator[Tensor], terms: Iterator[Tensor]) -> None:
        super().__init__()
        self.factors, self.terms = factors, terms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        bias = (kwargs or {}).get("attn_mask", args[3] if len(args) > 3 else None)
        scores = next(self.factors) * (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5 + next(self.terms)
        return torch.softmax(scores if bias is None else scores + bias, -1) @ value


def ones(model: nn.Module) -> list[Tensor]:
    return [torch.ones(()) for _ in answers(model)]


def answers(model: nn.Module) -> dict[str, MaskedAttention]:
    return {path: module for path, module in model.named_modules() if isinstance(module, MaskedAttention)}


def places(name: str) -> dict[str, Placement]:
    architecture, model_args = MODELS[name]
    batch = images(name)
    placed = placements(timm.create_model(architecture, **model_args), tuple(batch.shape[1:]))
    return {f"{place.module}.mask": place for place in placed}


# ---- the golden checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.first(2)
@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_golden_checkpoints(name: str) -> None:
    model = create(GOLDEN_MODELS[name], mask="gmm", kernels=3, form="stored", num_classes=10, **GOLDEN_ARGS).eval()
    model.load_state_dict(dict(read_tensors(GOLDEN / "timm" / f"{name}.pth.tar").tensors), strict=True)
    expected = np.load(GOLDEN / "timm" / f"{name}.npz")
    batch = torch.from_numpy(expected["images"])
    with torch.no_grad():
        for block, answer in enumerate(answers(model).values()):
            np.testing.assert_array_equal(answer.scores.before["mask"].matrix(), expected[f"mask{block}"])
        np.testing.assert_allclose(model(batch), expected["logits"], rtol=0, atol=2e-6)
        np.testing.assert_allclose(model.double()(batch.double()), expected["logits64"], rtol=0, atol=1e-12)


# ---- the formulas ----------------------------------------------------------------------------------------------------


@pytest.mark.first(1)
@each_model
def test_mixture_is_multiplied_after_the_scale_and_before_the_bias(name: str) -> None:
    model = build(name).double()
    at = places(name)
    factors = [mixture(answer.alpha, answer.sigma, at[path]) for path, answer in answers(model).items()]
    plain, batch = unmasked(name, model).double(), images(name).double()
    assert len(factors) == len(at) > 0
    with torch.no_grad():
        with WrittenOut(iter(factors), iter(0 * factor for factor in factors)):
            expected = plain(batch)
        torch.testing.assert_close(model(batch), expected, rtol=1e-9, atol=1e-9)
        assert (expected - plain(batch)).abs().max() > 1e-3  # the masks have an effect


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_decay_is_added_to_the_scores(name: str) -> None:
    model = build(name, mask="decay").double()
    terms = []
    for place in places(name).values():
        term = torch.zeros(place.heads, place.tokens, place.tokens, dtype=torch.float64)
        for head in range(place.heads):
            rate = math.log(1 - 2 ** (-2 - 4 * head / place.heads))
            for i, j in itertools.product(range(math.prod(place.grid)), repeat=2):
                steps = sum(map(abs, offset(i, j, place)))
                term[head, place.prefix + i, place.prefix + j] = rate * steps
        terms.append(term)
    plain, batch = unmasked(name, model).double(), images(name).double()
    with torch.no_grad():
        with WrittenOut(iter(ones(model)), iter(terms)):
            expected = plain(batch)
        torch.testing.assert_close(model(batch), expected, rtol=1e-6, atol=1e-6)  # the rates are stored in float32
        assert (expected - plain(batch)).abs().max() > 1e-3
    assert not [path for path, _ in model.named_parameters() if ".mask." in path]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("mask", "shapes"),
    [
        ({}, {"alpha": (3, 2, 1, 1), "sigma": (3, 2, 1, 1)}),
        ({"shared": True}, {"alpha": (3, 1, 1, 1), "sigma": (3, 1, 1, 1)}),
        ({"form": "stored"}, {"alpha": (3, 2, 1, 1), "sigma": (3, 2, 1, 1), "mask": (1, 1, 16, 16)}),
        ({"mask": "elm"}, {"mask": (16, 16)}),
        ({"mask": "decay"}, {"decay": (2,)}),
    ],
    ids=str,
)
def test_tensors_have_the_released_names(mask: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    model = build("vit", **mask)
    prefix = "blocks.1.attn.mask."
    stored = {k.removeprefix(prefix): tuple(v.shape) for k, v in model.state_dict().items() if k.startswith(prefix)}
    trained = {k.removeprefix(prefix) for k, _ in model.named_parameters() if k.startswith(prefix)}
    assert stored == shapes
    assert trained == set(shapes) - ({"decay"} if "decay" in shapes else {"mask"} if "alpha" in shapes else set())
    again = build("vit", **mask)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(model.state_dict(), strict=True)
    assert again(images("vit")).equal(model(images("vit")))


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["vit", "registers, qk norm", "swin", "pit", "maxvit"])
def test_masks_train(name: str) -> None:
    model = build(name).train()
    F.cross_entropy(model(images(name, 4)), torch.arange(4)).backward()
    last = list(answers(model))[-1]
    for path, answer in answers(model).items():
        for gradient in (answer.alpha.grad, answer.sigma.grad):
            assert gradient is not None
            assert bool(gradient.isfinite().all())
            is_dead = path == last and name in ("vit", "pit")  # the head reads the class token only
            assert bool((gradient != 0).any()) != is_dead


def test_training_drops_attention_weights() -> None:
    architecture, model_args = MODELS["vit"]
    model, batch = create(architecture, attn_drop_rate=0.5, **model_args), images("vit")
    assert not model(batch).equal(model(batch))
    assert model.eval()(batch).equal(model(batch))


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = build("vit").train()
    model(images("vit")).sum().backward()
    expected = {path: parameter.grad.clone() for path, parameter in model.named_parameters()}
    model.zero_grad()
    model.set_grad_checkpointing()
    model(images("vit")).sum().backward()
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[path])


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_copies_are_equal_and_independent(name: str) -> None:
    model, batch = build(name, form="stored").train(), images(name)
    model(batch).sum().backward()  # a bias of this pass must not stay in the model, where it could not be copied
    average = timm.utils.ModelEmaV3(model, decay=0.5).module
    copies = [other.eval() for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), average)]
    with torch.no_grad():
        expected = model.eval()(batch)
        assert all(other(batch).equal(expected) for other in copies)
        for answer in answers(model).values():
            answer.alpha.mul_(2.0)
        assert not model(batch).equal(expected)
        assert all(other(batch).equal(expected) for other in copies)


COMPILES = """
import copy, torch
from gmmvit_deploy.timm import create

for name, args in (
    ("vit_tiny_patch16_224", {args!r}),
    ("swin_tiny_patch4_window7_224", {swin!r}),
):
    torch.manual_seed(0)
    model = create(name, kernels=3, **args).eval()
    batch = torch.randn(2, 3, args["img_size"], args["img_size"])
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-5, atol=1e-6)
    compiled.train()(batch).sum().backward()
    model.train()(batch).sum().backward()
    attention = "blocks.0.attn" if "vit" in name else "layers.0.blocks.1.attn"
    gradient = compiled._orig_mod.get_submodule(attention).mask.alpha.grad
    torch.testing.assert_close(gradient, model.get_submodule(attention).mask.alpha.grad, rtol=1e-3, atol=1e-5)
"""


@pytest.mark.nightly
def test_compiles_as_one_graph() -> None:
    """The Python of the tests checks shapes in signatures, which torch.compile cannot trace; hence another Python."""
    code = COMPILES.format(args=MODELS["vit"][1], swin=MODELS["swin"][1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- warnings and errors ---------------------------------------------------------------------------------------------


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "more", "warns"),
    [("vit", {}, True), ("vit", {"global_pool": "avg"}, False), ("pit", {}, True), ("swin", {}, False)],
)
def test_warns_of_a_last_mask_without_effect(name: str, more: dict[str, str], warns: bool) -> None:
    architecture, model_args = MODELS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        create(architecture, **model_args, **more)
    texts = [str(warning.message) for warning in caught if "has no effect" in str(warning.message)]
    assert bool(texts) == warns
    assert all("global_pool='avg'" in text and ".attn has no effect" in text for text in texts)
    assert all(warning.filename == __file__ for warning in caught if str(warning.message) in texts)


def test_warns_of_large_masks() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch14_dinov2", depth=4, num_classes=5, global_pool="avg")
    with pytest.warns(UserWarning, match=r"344 MiB in an exported model.*1370 × 1370.*shared=True"):
        add_masks(model, image_shape=(3, 518, 518))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"mask": "gauss"}, "mask kind: expected one of gmm, elm, decay, got 'gauss'"),
        ({"form": "open"}, "form: expected one of closed, stored, got 'open'"),
        ({"kernels": 0}, "at least 1 kernel"),
        ({"mask": "elm", "shared": True}, "only for Gaussian mixture masks"),
    ],
    ids=str,
)
def test_options_that_cannot_be(mask: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        create("vit_tiny_patch16_224", **VIT, **mask)


def test_a_model_takes_masks_once() -> None:
    with pytest.raises(SpecError, match=r"VisionTransformer.*changed already"):
        add_masks(build("vit"))


def test_a_model_that_is_refused_does_not_change() -> None:
    model = timm.create_model("cait_xxs24_224", depth=1)
    before = {path: type(module) for path, module in model.named_modules()}
    with pytest.raises(SpecError, match=r"cannot take a mask.*TalkingHeadAttn"):
        add_masks(model)
    assert {path: type(module) for path, module in model.named_modules()} == before


def test_images_of_another_shape() -> None:
    architecture, model_args = MODELS["vit"]
    with pytest.raises(SpecError, match=r"3 × 20 × 20 failed.*doesn't match model") as refused:
        add_masks(timm.create_model(architecture, **model_args), image_shape=(3, 20, 20))
    assert "image_shape=(channels, height, width) to add_masks" in refused.value.hint
    shape = (3, model_args["img_size"], model_args["img_size"])
    assert add_masks(timm.create_model(architecture, **model_args), image_shape=shape)
    inside = nn.Sequential(timm.create_model(architecture, **model_args))
    with pytest.raises(SpecError, match="does not state the shape of its images") as refused:
        add_masks(inside)
    assert "image_shape=(channels, height, width) to add_masks" in refused.value.hint
    assert add_masks(inside, image_shape=shape)
