"""The contract of every family, tested on its small models and on its golden checkpoints.

``pytest tests/models/families -k NAME`` runs the tests of a family. A new family is tested once it is in `FAMILIES` and
has a folder of golden files (`tests.conftest.MANIFEST`); nothing here names a family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.exporting import graphs_of_precisions
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.graphs.declared import declared_role
from gmmvit_deploy.inference.matcher import Refusal, attentions_in
from gmmvit_deploy.inference.precision import CALIBRATED, PRECISIONS, QUANTIZED, ROLES, Precision
from gmmvit_deploy.models.families import FAMILIES, PRESETS, family_of, spec_from_json
from gmmvit_deploy.models.families.deepvit import DEEPVIT
from gmmvit_deploy.models.families.family import Family
from gmmvit_deploy.models.families.rmt import RMT
from gmmvit_deploy.models.folding.fold import engine_passes, fold, fold_for_engines, folding_passes
from gmmvit_deploy.models.layers.attention import attentions_without_scores
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.sources.hints import WEIGHTS_KINDS, WeightsKind
from gmmvit_deploy.models.specs import MaskKind, input_shape, spec_to_json
from gmmvit_deploy.parity._localize import last_tensors
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.suspects import explain, suspects
from gmmvit_deploy.reports.pictures.mask_images import sheet
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of
from gmmvit_deploy.runtimes.programs.openvino import read_graph
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.conftest import EXPORTED, LATER, MANIFEST, NAMES, Golden, golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import STRUCTURES, each_export, loaded
from tests.models.families.small_models import (
    FAMILY_EXAMPLES,
    MAX_BATCH,
    SMALL,
    Small,
    SmallExports,
    distinct_model,
    failing_rules,
    random_images,
    require_logits_of_precision,
)
from tests.models.families.small_specs import small_spec, small_specs, variants

OTHER_PRECISIONS: tuple[Precision, ...] = tuple(precision for precision in PRECISIONS if precision != "fp32")


def marks(small: Small) -> list[pytest.MarkDecorator]:
    """Return the mark ``nightly`` unless `make test` exports a network of the family."""
    in_make_test = small.family.name in {MANIFEST[name]["family"] for name in STRUCTURES} and not small.variant
    return [] if in_make_test else [pytest.mark.nightly]


def each(smalls: Iterable[Small]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "small", [pytest.param(small, id=str(small), marks=marks(small)) for small in smalls]
    )


each_small = each(SMALL)
each_example = each(FAMILY_EXAMPLES)
each_with_mistakes = pytest.mark.parametrize(
    "where",
    [
        *(pytest.param(small, id=str(small), marks=marks(small)) for small in FAMILY_EXAMPLES),
        *each_export(name for name in LATER if name in EXPORTED),
    ],
)
each_family_example = each(small for small in FAMILY_EXAMPLES if not small.variant)
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def attention_names(model: Model) -> list[str]:
    """Return the name of each attention of a model, with or without Q Kᵀ, in the order of the modules."""
    names = {*attentions_without_scores(model), *(name for name, _ in attention_scores(model))}
    return [name for name, _ in model.named_modules() if name in names]


def _id(name: str) -> str:
    family = str(MANIFEST[name]["family"])
    return name if name.startswith(family) else f"{family}-{name}"  # so that -k FAMILY selects it


@pytest.fixture(scope="session")
def small_exports(shared: Path) -> SmallExports:
    """The small models of every family, exported when they are first asked for."""
    return SmallExports(shared)


@pytest.fixture(params=NAMES, ids=_id)
def case(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


# ---- golden checkpoints --------------------------------------------------------------------------------------------


def test_golden_logits(case: Golden) -> None:
    model = loaded(case.name).model
    with torch.inference_mode():
        logits = model(torch.from_numpy(case.inputs)).numpy()
    np.testing.assert_allclose(logits, case.logits, rtol=0, atol=case.atol)
    assert_same_logits(exact_logits(model, case.inputs), case.exact)


def test_golden_checkpoint_is_what_its_manifest_states(case: Golden) -> None:
    checkpoint, entry = loaded(case.name), MANIFEST[case.name]
    assert checkpoint.spec.family == entry["family"]
    assert input_shape(checkpoint.spec) == case.inputs.shape[1:]
    assert checkpoint.spec.classes == case.logits.shape[1]
    assert checkpoint.spec.mask.kind == entry["mask"]
    assert checkpoint.trainable_parameters == entry["trainable_parameters"]


def test_each_folding_pass_keeps_the_golden_logits(case: Golden) -> None:
    """In float64, where a pass changes the logits by rounding only."""
    model = copy.deepcopy(loaded(case.name).model).double().requires_grad_(False)
    atol = 1e-11 if case.name == "sl_cait" else 1e-12  # folding leaves the −1e-9 on the diagonal of this CaiT out
    for run in folding_passes(model.spec):
        if run(model):
            assert_same_logits(exact_logits(model, case.inputs), case.exact, run.__name__, atol=atol)
            assert run(model) == (), f"{run.__name__} changes the network again"


def mistaken(model: Model) -> Iterator[tuple[str, Model]]:
    """Yield (description, model with the mistake in all its attentions) for each mistake of the steps."""
    names = dict.fromkeys(
        n for _, scores in attention_scores(model) for _, step in scores.steps() for n, _ in step.mistakes()
    )
    for name in names:
        other = copy.deepcopy(model)
        for _, scores in attention_scores(other):
            for step_name, step in list(scores.steps()):
                mistakes = dict(step.mistakes())
                if name in mistakes:
                    scores.put(step_name, mistakes[name])
        yield name, other


@pytest.mark.parametrize("name", each_export(LATER))
def test_each_mistake_in_reading_is_far_from_the_golden_logits(name: str) -> None:
    """A reference made from the same wrong reading would repeat the mistake; the training code's logits do not."""
    case, model = golden(name), loaded(name).model
    wrong = dict(mistaken(model))
    for mistake, change in family_of(model.spec).network().mistakes:
        other = copy.deepcopy(model)
        if change(other):
            wrong[mistake] = other
    assert wrong
    for mistake, other in wrong.items():
        if "shift mask" in mistake:  # few tokens of a small image are on both sides of a border
            continue
        limit = case.limit() if "epsilon" in mistake else 1e-3
        assert not np.abs(exact_logits(other, case.inputs) - case.exact).max() <= limit, mistake  # NaN is far as well


@each_family
def test_has_golden_files(family: Family) -> None:
    if family.name == "hugging_face":
        pytest.skip("transformers writes the folders of tests/hugging_face, and computes the expected logits there")
    assert any(MANIFEST[name]["family"] == family.name for name in NAMES)


# ---- the record ----------------------------------------------------------------------------------------------------


@each_family
def test_record_agrees_with_its_spec(family: Family) -> None:
    assert family.mask_kinds
    assert family.sources
    for kind, spec in small_specs(family).items():
        assert (spec.family, spec.mask.kind) == (family.name, kind)
        assert family_of(spec) is family
        assert spec_from_json(spec_to_json(spec)) == spec
    for spec in variants(family).values():
        assert family_of(spec) is family
        assert spec_from_json(spec_to_json(spec)) == spec
    for kind in set(get_args(MaskKind)) - set(family.mask_kinds):
        with pytest.raises(SpecError):
            small_spec(family.name, kind)


def test_names_of_families_and_presets_are_unique() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert len(PRESETS) == sum(len(family.presets) for family in FAMILIES)


@each_small
def test_each_source_names_every_tensor(small: Small) -> None:
    state = small.model().state_dict()
    for source in small.family.sources:
        assert source.tensors(small.spec, state).keys() == state.keys(), source.name


# ---- folding -------------------------------------------------------------------------------------------------------


@each_family
def test_each_own_pass_of_a_family_changes_a_network(family: Family) -> None:
    if family.name in ("timm", "hugging_face"):
        pytest.skip("tests/timm and tests/hugging_face state which passes change each network")
    models = [small.model() for small in SMALL if small.family is family]
    models += [loaded(name).model for name in LATER if golden(name).family == family.name]
    changing = {name for model in models for name, changed in fold(model).passes.items() if changed}
    assert {run.__name__ for run in family.network().folding_passes} <= changing


@each_small
def test_folding_keeps_logits(small: Small) -> None:
    model, images = small.model(), small.images()
    folded = fold(model)
    assert all(step.is_constant for _, scores in attention_scores(folded.model) for _, step in scores.steps())
    with torch.inference_mode():
        trained = model(torch.from_numpy(images)).numpy()
        logits = folded.model(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(logits, trained, rtol=0, atol=2e-5 * max(1.0, float(np.abs(trained).max())))
    assert (small.family.last_block(small.spec) is not None) == bool(folded.passes["narrow_last_block"])
    for quantized in (False, True):
        engine = fold_for_engines(folded, engine_passes(small.spec, quantized=quantized))
        assert_same_logits(exact_logits(engine.model, images), exact_logits(folded.model, images))


# ---- export --------------------------------------------------------------------------------------------------------


@each_example
def test_exports_and_reopens(small: Small, small_exports: SmallExports) -> None:
    bundle, images = small_exports.bundle(small), small.images()
    assert bundle.manifest.spec == small.spec
    with torch.inference_mode():
        trained = small.model()(torch.from_numpy(images)).numpy()
        again = model_from_bundle(bundle.manifest, bundle.weights_path)(torch.from_numpy(images)).numpy()
    np.testing.assert_array_equal(again, trained)
    with OnnxRuntimeRunner(bundle) as runner:
        noise = Noise(largest=bundle.manifest.float32_noise, rms=0.0, scale=float(np.abs(trained).max()))
        allowed = limit_from_noise(noise).largest + bundle.manifest.float32_noise
        np.testing.assert_allclose(runner.run(images), trained, rtol=0, atol=allowed)


@each_example
def test_every_node_declares_its_role(small: Small, small_exports: SmallExports) -> None:
    bundle = small_exports.bundle(small)  # exported with rules that raise
    graph = ir.load(bundle.onnx_path).graph
    assert [node.name for node in graph if declared_role(node) is None] == []


@each_example
def test_kernel_takes_each_attention_or_gives_a_reason(small: Small, small_exports: SmallExports) -> None:
    matches = attentions_in(read_graph(small_exports.bundle(small).onnx_path))
    assert sorted(match.name for match in matches) == sorted(attention_names(small.model()))
    assert all(match.reason for match in matches if isinstance(match, Refusal))


@pytest.mark.parametrize(
    ("small", "precision"),
    [
        pytest.param(small, precision, id=f"{small}-{precision}", marks=pytest.mark.nightly if later else [])
        for later, small in enumerate(FAMILY_EXAMPLES)
        if not small.variant or str(small) in ("swin-spt-lsa", "cait-spt-lsa")
        for precision in (("fp16", "int8") if later else OTHER_PRECISIONS)
    ],
)
def test_each_precision_exports(
    small: Small, precision: Precision, small_exports: SmallExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = small.model(), small.images()

    def exported_once(folded: Any, **options: Any) -> ir.Model:
        return small_exports.graph(small, precision, folded)

    monkeypatch.setattr(graphs_of_precisions, "onnx_from_model", exported_once)
    calibration = [images, small.images(2)] if precision in CALIBRATED else None
    with failing_rules():
        prepared = graphs_of_precisions.graph_from_model(
            model, precision, preprocessing=None, max_batch=MAX_BATCH, calibration=calibration
        )
    roles = {declared_role(node) for node in prepared.model.graph}
    assert roles <= set(ROLES)
    require_logits_of_precision(prepared.model, precision, model, images)


# ---- parity and pictures -------------------------------------------------------------------------------------------


@each_with_mistakes
def test_usual_mistakes_are_caught_by_name(
    where: Small | str, small_exports: SmallExports, tensor_bundles: dict[str, Bundle]
) -> None:
    bundle = tensor_bundles[where] if isinstance(where, str) else small_exports.bundle(where)
    images = golden(where).inputs if isinstance(where, str) else where.images()
    reference = Reference(bundle)
    trained, _ = reference.logits(images)
    limit = 1e-6 * float(np.abs(trained).max())
    given = dict(suspects(bundle, reference, images))
    own = {
        name
        for name, change in family_of(reference.model.spec).network().mistakes
        if change(copy.deepcopy(reference.model))
    }
    assert own <= set(given)
    for name, logits in given.items():
        if float(np.abs(logits - trained).max()) < 100 * limit:
            assert name not in own, f"{name}: the mistake changes nothing in the small model"
            continue
        named = explain(bundle, reference, images, logits, limit, mistakes=given.items())
        # For two mistakes with the same logits the first is reported.
        assert named, name
        np.testing.assert_allclose(given[named], logits, rtol=0, atol=limit, err_msg=f"{name} was named {named}")


@each_family
def test_each_mistake_of_a_family_can_be_made_in_a_small_model(family: Family) -> None:
    if family.name == "hugging_face":
        pytest.skip("tests/hugging_face/test_zero_shot.py makes it in a network with texts")
    models = [small.model() for small in FAMILY_EXAMPLES if small.family is family]
    mistakes = family.network().mistakes
    made = {name for model in models for name, change in mistakes if change(copy.deepcopy(model))}
    assert made == {name for name, _ in mistakes}


@each_family_example
def test_blocks_are_listed_in_the_order_in_which_the_graph_runs_them(small: Small, small_exports: SmallExports) -> None:
    model = small.model()
    blocks = family_of(model.spec).blocks(model.spec)
    ran: list[str] = []
    for name in blocks:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    model(torch.from_numpy(small.images()))
    assert ran == list(blocks)
    inside = [name for name in attention_names(model) if any(f"{name}.".startswith(f"{block}.") for block in blocks)]
    assert inside == attention_names(model)
    assert list(last_tensors(ir.load(small_exports.bundle(small).onnx_path).graph, blocks)) == list(blocks)


@each_small
def test_masks_are_drawn(small: Small) -> None:
    layers = masks_of(small.model())
    assert bool(layers) == (small.kind not in ("plain", "decay"))  # decay is a bias on the scores, not a mask
    if layers:
        assert sheet(layers, title=str(small)).width > 0


# ---- networks that differ from the small model of their family, in fp16 and int8 -------------------------------------


OTHER: dict[str, tuple[Family, dict[str, Any]]] = {
    "rmt-2023": (RMT, {"release": "2023", "projection_dim": 0}),
    "rmt-token_label": (RMT, {"release": "token_label"}),
    "deepvit-odd_head_dim": (DEEPVIT, {"dim": 99, "heads": 3}),
}
"""Name of a small model → its family, and the fields in which its spec differs from that of the contract."""
GOLDEN = ("deepvit_patch",)


def model_and_images(name: str) -> tuple[Model, np.ndarray]:
    if name in OTHER:
        family, fields = OTHER[name]
        spec = replace(small_spec(family.name, family.mask_kinds[0]), **fields)
        return distinct_model(spec), random_images(spec)
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model, case.inputs


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp16") for name in (*OTHER, *GOLDEN)), ("rmt-2023", "int8")])
def test_other_networks_in_each_precision(name: str, precision: Precision) -> None:
    """bf16 has the nodes of fp16, and fp8 those of int8."""
    model, images = model_and_images(name)
    calibration = [images] if precision in CALIBRATED else None
    with failing_rules():
        prepared = graph_from_model(model, precision, preprocessing=None, max_batch=8, calibration=calibration)
    assert {declared_role(node) for node in prepared.model.graph} <= set(ROLES)
    share = require_logits_of_precision(prepared.model, precision, model, images)
    assert share < (0.25 if precision in QUANTIZED else 0.05)


# ---- averaged weights read as trained --------------------------------------------------------------------------------


BOTH = ("deepvit_ema_amp", "eanet_performer", "rmt_tiny_like", "timm_vit", "timm_deit_distilled")
"""Golden files of training scripts that average the weights: a file for each family of such scripts, two for timm."""
AVERAGED_LOGITS = ("logits_ema64", "logits64_ema")
"""Names of the authors' logits with the averaged weights, if stored."""
FAR = 100


def logits_of(case: Golden, weights: WeightsKind) -> np.ndarray:
    return exact_logits(load_checkpoint(case.path, replace(case.hints, weights=weights)).model, case.inputs)


def test_a_file_of_every_family_with_averaged_weights_is_here() -> None:
    asked = {entry["family"] for entry in MANIFEST.values() if entry.get("hints", {}).get("weights") in WEIGHTS_KINDS}
    assert asked == {golden(name).family for name in BOTH}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", BOTH)
def test_the_wrong_kind_of_weights_is_far_from_the_golden_logits(name: str) -> None:
    case = golden(name)
    entry = MANIFEST[name]
    stored = np.load(entry["folder"] / entry.get("inputs", f"{name}.npz"))
    trained, averaged = (logits_of(case, weights) for weights in WEIGHTS_KINDS)
    assert_same_logits(trained, stored["logits64"])
    assert np.abs(averaged - stored["logits64"]).max() > FAR * case.atol
    for key in set(AVERAGED_LOGITS) & {*stored.files}:
        assert_same_logits(averaged, stored[key])
        assert np.abs(trained - stored[key]).max() > FAR * case.atol
