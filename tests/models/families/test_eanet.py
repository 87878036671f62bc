"""EANet: the released code's float64 logits, its folding passes, and files that are refused."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.checkpoints.report import describe_checkpoint
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import CheckpointError, GmmvitError, SpecError
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.export.variants import graph_from_model, prepared_graph
from gmmvit_deploy.graphs.quantize import QUANTIZED
from gmmvit_deploy.graphs.roles import attentions_of, roles_of
from gmmvit_deploy.models.families import model_from_spec, preset_spec
from gmmvit_deploy.models.families.counting import trainable_parameters
from gmmvit_deploy.models.families.eanet import EANET, folding
from gmmvit_deploy.models.families.eanet.attention import ExternalAttention, MergedExternalAttention, SlotWeights
from gmmvit_deploy.models.families.eanet.model import ClassRowFirst, EANet
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.folding.last_block import narrow_last_block
from gmmvit_deploy.models.layers.attention import attention_names
from gmmvit_deploy.models.layers.unfolding import Unfold, UnfoldConvolution
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.precision import POLICY, PRECISIONS, Precision
from gmmvit_deploy.runtimes.engines.graph_source import source_from_onnx
from gmmvit_deploy.runtimes.engines.proof import prove_attentions
from gmmvit_deploy.runtimes.kernels.matcher import Refusal, attentions_in_onnx
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.tolerances import Noise, limit_from_stored
from tests.checkpoints.test_hostile_files import Calls, Ordinary
from tests.conftest import GOLDEN, MANIFEST, golden
from tests.exact import assert_same_logits, exact_logits

FOLDER = GOLDEN / "eanet"
NAMES = tuple(name for name, entry in MANIFEST.items() if entry["folder"] == FOLDER)
SMALLEST = "eanet_tied_cpu"
SLOTS = "token_transformers.0.weights", "token_transformers.1.weights"


def loaded(name: str, **hints: Any) -> LoadedCheckpoint:
    case = golden(name)
    return load_checkpoint(case.path, LoadHints(**hints) if hints else case.hints)


def arrays(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / f"{name}.npz"))


# ---- golden logits -------------------------------------------------------------------------------------------------

BOTH_KINDS = [(name, "trained", "logits") for name in NAMES] + [("eanet_performer", "averaged", "logits_ema")]


@pytest.mark.parametrize(("name", "weights", "key"), BOTH_KINDS)
def test_float64_logits_are_those_of_the_released_code(name: str, weights: str, key: str) -> None:
    hints = {"weights": weights} if name == "eanet_performer" else {}
    expected = arrays(name)
    model = loaded(name, **hints).model
    np.testing.assert_allclose(exact_logits(model, expected["images"]), expected[f"{key}64"], rtol=0, atol=1e-12)
    with torch.inference_mode():
        logits = model(torch.from_numpy(expected["images"])).numpy()
    difference, scale = np.abs(expected[key] - expected[f"{key}64"]).max(), np.abs(expected[key]).max()
    limit = limit_from_stored(Noise(largest=float(difference), rms=0.0, scale=float(scale)))
    np.testing.assert_allclose(logits, expected[key], rtol=0, atol=limit.largest)


def test_averaged_weights_are_not_taken_for_trained_weights() -> None:
    expected = arrays("eanet_performer")
    logits = exact_logits(loaded("eanet_performer", weights="averaged").model, expected["images"])
    assert np.abs(logits - expected["logits64"]).max() > 1e-3
    with pytest.raises(CheckpointError, match="holds trained weights under 'state_dict' and averaged weights"):
        load_checkpoint(golden("eanet_performer").path)


def test_stored_positions_are_used_and_noted() -> None:
    averaged = loaded("eanet_performer", weights="averaged")
    (finding,) = [finding for finding in averaged.findings if finding.where == "positions"]
    assert finding.severity == "note"
    assert finding.what.startswith("the stored positions differ from the sinusoids by up to 6.08e-06")
    assert not [finding for finding in loaded("eanet_transfer").findings if finding.where == "positions"]


@pytest.mark.parametrize("name", NAMES)
def test_the_second_memory_is_read_with_its_strides(name: str, tmp_path: Path) -> None:
    """The file stores the memory transposed, and after training on a CPU in the storage of the first memory."""
    case = loaded(name)
    model = case.model
    keys = [key for key in case.file.tensors if ".attention1.attn.linear_" in key and key.endswith(".weight")]
    first, second = (case.file.tensors[key] for key in sorted(keys))
    assert not second.is_contiguous()
    tied = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert tied == (name == "eanet_tied_cpu")
    assert first.t().equal(second) == tied
    transformer = model.get_submodule("token_transformers.0")
    assert transformer.to_slots.weight.equal(first)
    assert transformer.from_slots.weight.equal(second)
    with torch.no_grad():  # separate memory in the model
        transformer.from_slots.weight.add_(1)
        assert transformer.to_slots.weight.equal(first)
        transformer.from_slots.weight.copy_(second)
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(bytes_from_model(model))
    again = load_checkpoint(weights).model.state_dict()
    assert all(tensor.is_contiguous() for tensor in again.values())
    assert all(again[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_performer_and_transformer_are_two_names_of_one_function(tmp_path: Path) -> None:
    state = dict(loaded("eanet_transformer").file.tensors)
    renamed = {}
    for key, tensor in state.items():
        if ".attention1.attn." in key or ".attention2.attn." in key:
            key = key.replace(".linear_1.", ".linear_0.").replace(".linear_2.", ".linear_1.")
        renamed[key] = tensor
    path = tmp_path / "performer.pth"
    torch.save(renamed, path)
    images = torch.from_numpy(golden("eanet_transformer").inputs)
    with torch.inference_mode():
        assert load_checkpoint(path).model(images).equal(loaded("eanet_transformer").model(images))


# ---- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side", "count", "positions"),
    [
        ("T2t_vit_7", 224, 6_096_206, 50_432),
        ("T2t_vit_7", 384, 6_096_206, 147_712),
        ("T2t_vit_10", 224, 8_489_678, 50_432),
        ("T2t_vit_12", 224, 10_085_326, 50_432),
        ("T2t_vit_14", 224, 29_801_422, 75_648),
        ("T2t_vit_t_14", 224, 29_801_422, 75_648),
        ("T2t_vit_19", 224, 54_470_798, 88_256),
        ("T2t_vit_t_19", 224, 54_470_798, 88_256),
        ("T2t_vit_24", 224, 89_355_726, 100_864),
        ("T2t_vit_t_24", 224, 89_355_726, 100_864),
        ("T2t_vit_14_resnext", 224, 29_707_510, 75_648),
        ("T2t_vit_14_wide", 224, 34_423_758, 151_296),
    ],
)
def test_trainable_parameters_of_presets(name: str, side: int, count: int, positions: int) -> None:
    with torch.device("meta"):
        model = model_from_spec(preset_spec(name, classes=1000, image_size=side, mask=MaskSpec()))
    assert trainable_parameters(model) == count
    assert (
        sum(model.state_dict()[name].numel() for name, _ in model.named_buffers() if "weights" not in name) == positions
    )


def test_sides_are_multiples_of_16() -> None:
    with pytest.raises(SpecError, match="image side 40: expected a multiple of 16"):
        preset_spec("T2t_vit_7", classes=10, image_size=40, mask=MaskSpec())


# ---- folding -------------------------------------------------------------------------------------------------------

PASSES: dict[str, Callable[[EANet], tuple[str, ...]]] = {
    "unfold_as_convolution": folding.unfold_as_convolution,
    "merge_token_memories": folding.merge_token_memories,
    "class_token_as_row": folding.class_token_as_row,
    "merge_memories": folding.merge_memories,
    "narrow_last_block": narrow_last_block,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("run", PASSES)
def test_each_pass_is_exact(run: str, name: str) -> None:
    images = golden(name).inputs
    model = loaded(name).model.double().requires_grad_(False)
    expected = exact_logits(model, images)
    changed = PASSES[run](model)
    assert changed
    assert PASSES[run](model) == ()
    assert_same_logits(exact_logits(model, images), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_folded_model_is_exact_in_float64(name: str) -> None:
    images = golden(name).inputs
    model = loaded(name).model.double()
    folded = fold(model)
    assert_same_logits(exact_logits(folded.model, images), exact_logits(model, images))
    assert set(PASSES) <= {run for run, changed in folded.passes.items() if changed}


def test_what_folding_leaves() -> None:
    model = loaded(SMALLEST).model
    spec = model.spec
    folded = fold(model).model
    assert isinstance(folded, EANet)
    assert not [module for module in folded.modules() if isinstance(module, Unfold | ExternalAttention)]
    assert all(isinstance(unfold, UnfoldConvolution) for unfold in folded.unfolds)
    assert isinstance(folded.positions, ClassRowFirst)
    assert folded.project.bias is None
    for block in folded.blocks:
        assert isinstance(block.attention, MergedExternalAttention)
        linear = [module for module in block.attention.modules() if isinstance(module, nn.Linear)]
        assert [tuple(layer.weight.shape) for layer in linear] == [
            (spec.heads * 4 * 64, spec.dim),
            (spec.dim, spec.heads * 4 * 64),
        ]
        assert linear[0].bias is None
    for transformer in folded.token_transformers:
        assert tuple(transformer.out.weight.shape) == (spec.token_dim, 128)
        assert not list(transformer.from_slots.parameters())
    narrowed, whole = folded.blocks[-1], folded.blocks[0]
    tokens = torch.randn(2, spec.tokens, spec.dim)
    assert narrowed(tokens).shape == (2, 1, spec.dim)
    assert whole(tokens).shape == tokens.shape


def test_the_narrowed_block_runs_its_softmax_over_all_tokens() -> None:
    block = fold(loaded(SMALLEST).model).model.get_submodule("blocks.1")
    tokens = torch.randn(1, 5, 32)
    other = tokens.clone()
    other[:, 3] += 1
    assert not block(tokens).equal(block(other))


def test_folding_refuses_a_pass_that_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(SMALLEST).model
    trained = ExternalAttention.forward
    monkeypatch.setattr(ExternalAttention, "forward", lambda self, x, first=False: 2 * trained(self, x, first=first))
    with pytest.raises(GmmvitError, match=r"blocks\.0\.attention: folding changed the output by"):
        folding.merge_memories(model)


def test_dead_biases_have_no_influence_and_are_reported() -> None:
    case, images = loaded(SMALLEST), golden(SMALLEST).inputs
    model = case.model
    assert isinstance(model, EANet)
    expected = exact_logits(model, images)
    assert len(model.dead_biases()) == 3 * model.spec.depth
    with torch.no_grad():
        for name in model.dead_biases():
            model.get_parameter(name).normal_()
    assert_same_logits(exact_logits(model, images), expected)
    (finding,) = [finding for finding in describe_checkpoint(case)["audit"] if finding["where"] == "blocks"]
    assert finding["severity"] == "note"
    assert "attention.to_slots.bias of every block have no influence on the logits" in finding["what"]


def test_no_other_bias_of_a_block_is_dead() -> None:
    model, images = loaded(SMALLEST).model, golden(SMALLEST).inputs
    assert isinstance(model, EANet)
    expected = exact_logits(model, images)
    others = [
        name
        for name, _ in model.named_parameters()
        if name.endswith(".bias") and name.startswith("blocks.") and name not in model.dead_biases()
    ]
    for name in others:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.get_parameter(name).add_(torch.randn_like(changed.get_parameter(name)))
        assert np.abs(exact_logits(changed, images) - expected).max() > 1e-6, name


# ---- the two normalisations ----------------------------------------------------------------------------------------


def test_a_token_whose_slots_all_underflow_gets_zeros() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[:, 0] = -1000.0
    weights = SlotWeights(4)(logits)
    assert weights[:, 0].equal(torch.zeros(1, 4))
    assert weights.isfinite().all()
    assert torch.tensor(1e-9).half() == 0  # why both normalisations stay in float32


@pytest.fixture(scope="module")
def smallest_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    case = golden(SMALLEST)
    options = ExportOptions(input_kind="tensor", max_batch=4)
    return bundle_from_checkpoint(case.path, tmp_path_factory.mktemp("eanet") / "bundle", options, hints=case.hints)


@pytest.mark.rest
@pytest.mark.export
def test_both_normalisations_compute_in_float32(smallest_bundle: Bundle) -> None:
    graph = onnx.load(smallest_bundle.onnx_path).graph
    roles = roles_of(graph)
    inside = {node.name: roles[node.name] for node in graph.node if "weights/" in node.name}
    computed = {name.rpartition("/")[2].partition(".")[0]: role for name, role in inside.items() if role != "shape"}
    assert computed == {"Softmax": "softmax", "ReduceSum": "norm", "Add": "norm", "Div": "norm"}
    assert {kind for role in computed.values() for kind in POLICY[role].values()} == {"float32"}


@pytest.mark.export
def test_an_attention_without_products_is_listed_with_its_reason(smallest_bundle: Bundle) -> None:
    proto = onnx.load(smallest_bundle.onnx_path)
    names = attention_names(loaded(SMALLEST).model)
    assert names == (*SLOTS, "blocks.0.attention.weights", "blocks.1.attention.weights")
    listed = attentions_of(proto.graph)
    assert [(attention.name, attention.known) for attention in listed] == [(name, False) for name in names]
    matches = attentions_in_onnx(proto.SerializeToString())
    assert all(isinstance(match, Refusal) for match in matches)
    reason = "its softmax does not run over the keys, the last dimension"
    assert [(match.name, match.reason) for match in matches if isinstance(match, Refusal)] == [
        (name, reason) for name in names
    ]
    source = source_from_onnx(smallest_bundle.onnx_path)
    proofs = prove_attentions(
        (), source.attentions, target="8.9", profiles=1, head_dims=source.head_dims, unmatched=source.unmatched
    )
    assert [(proof.name, proof.fused) for proof in proofs] == [(name, False) for name in names]
    assert {proof.reason for proof in proofs} == {f"this softmax is not part of a known form of attention: {reason}"}


@pytest.mark.rest
@pytest.mark.export
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_cast_is_not_the_reason_in_half_precision(
    precision: Precision, smallest_bundle: Bundle, tmp_path: Path
) -> None:
    path = tmp_path / "half.onnx"
    onnx.save(prepared_graph(smallest_bundle, precision).proto, path)
    reason = "its softmax does not run over the keys, the last dimension"
    assert source_from_onnx(path).unmatched == dict.fromkeys(attention_names(loaded(SMALLEST).model), reason)


@pytest.mark.first(1)
@pytest.mark.export
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_gives_finite_logits_where_weights_underflow(precision: Precision) -> None:
    """Weights that underflow to 0 in every slot of most tokens; without the 1e-9 they would be 0/0."""
    model = EANET.build(replace(EANET.small(MaskSpec()), slots=2)).eval()  # 5 tokens: most win no slot
    assert isinstance(model, EANet)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.project.weight.mul_(100)
            block.attention.to_slots.weight.mul_(10)
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32), dtype=np.float32)
    weights: list[Tensor] = []
    model.blocks[0].attention.weights.register_forward_hook(lambda _, __, out: weights.append(out))
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).numpy()
    assert (weights[0] == 0).unflatten(-1, (-1, 2)).all(-1).any()
    calibration = [images] if precision in QUANTIZED else None
    prepared = graph_from_model(model, precision, preprocessing=None, max_batch=4, calibration=calibration)
    logits = emulated_logits(prepared.proto, images, name=precision)
    assert np.isfinite(logits).all()
    if precision == "fp32":
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


# ---- usual mistakes, made in reading a file ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mistake", [mistake for mistake, _ in EANET.mistakes])
def test_each_mistake_is_far_from_the_golden_logits(mistake: str, name: str) -> None:
    model = loaded(name).model
    assert dict(EANET.mistakes)[mistake](model)
    logits = exact_logits(model, golden(name).inputs)
    assert np.abs(logits - golden(name).exact).max() > 1e-3  # the largest limit of float32 is 1.7e-5


# ---- files that are refused ----------------------------------------------------------------------------------------


def damaged(name: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write a copy of a golden file whose content was changed."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(golden(name).path, weights_only=True)
    change(content)
    path = folder / golden(name).path.name
    torch.save(content, path)
    return path


def state_of(content: dict[str, Any]) -> dict[str, Tensor]:
    return next(content[key] for key in ("state_dict", "net") if key in content)


def without(suffix: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        state = state_of(content)
        del state[next(key for key in state if key.endswith(suffix))]

    return change


def replaced(suffix: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        state = state_of(content)
        key = next(key for key in state if key.endswith(suffix))
        state[key] = value(state[key])

    return change


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blocks.0.attn.trans_dims.weight"), "tensor blocks.0.attn.trans_dims.weight is missing"),
        (without("attention1.attn.q_linear.weight"), "attention1.attn.q_linear.weight is missing"),
        (without("blocks.1.attn.linear_0.bias"), "the file has no tensor blocks.1.attn.linear_0.bias"),
        (without("pos_embed"), "tensor pos_embed is missing"),
        (
            replaced("pos_embed", lambda tensor: tensor[:, :-1]),
            r"pos_embed, without the class token, has \d+ positions; expected a square grid",
        ),
        (
            replaced("attention1.norm1.weight", lambda tensor: tensor[:-1]),
            r"attention1\.norm1\.weight has 146 entries; expected one of 49, 98, 147, 196",
        ),
        (
            replaced("blocks.0.attn.linear_0.weight", lambda tensor: tensor[:, :-1]),
            r"expected \(a multiple of D, D\) and \(slots, a divisor of D\)",
        ),
        (
            replaced("blocks.1.attn.proj.weight", lambda tensor: tensor.t().contiguous()),
            r"blocks\.1\.attn\.proj\.weight has shape \(\d+, \d+\), expected \(\d+, \d+\)",
        ),
        (
            replaced("attention2.attn.proj.bias", lambda tensor: tensor.fill_(torch.nan)),
            "attention2.attn.proj.bias: .* values are NaN or infinite",
        ),
    ],
    ids=["no trans_dims", "no q_linear", "no bias", "no positions", "positions", "norm", "memory", "transposed", "NaN"],
)
def test_files_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, name: str, tmp_path: Path
) -> None:
    path = damaged(name, tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path, golden(name).hints)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", [Ordinary(), Calls(print, 1)], ids=["another class", "a call"])
def test_hostile_arguments_are_refused(value: object, tmp_path: Path) -> None:
    path = damaged(SMALLEST, tmp_path, lambda content: setattr(content["args"], "lr", value))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_files_are_refused(name: str, tmp_path: Path) -> None:
    content = golden(name).path.read_bytes()
    path = tmp_path / golden(name).path.name
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, golden(name).hints)
    assert str(path) in str(caught.value)


def test_options_that_contradict_the_file_are_refused() -> None:
    case = golden(SMALLEST)
    with pytest.raises(CheckpointError, match="--set heads=4, but the number of heads that follows from the memories"):
        load_checkpoint(case.path, LoadHints(heads=4))
    with pytest.raises(CheckpointError, match="--image-size 64 contradicts the file: its tensors show 32"):
        load_checkpoint(case.path, LoadHints(image_size=64))
    with pytest.raises(CheckpointError, match="the file does not match the preset T2t_vit_7"):
        load_checkpoint(case.path, LoadHints(preset="T2t_vit_7"))
