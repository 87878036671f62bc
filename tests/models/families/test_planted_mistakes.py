"""The usual mistakes, each planted in a copy of an exported graph: ``gmmvit parity`` fails and names the mistake.

``pytest tests/models/families/test_planted_mistakes.py -k NAME`` runs the mistakes of a small model or a checkpoint.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import onnx
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.models.families import FAMILIES, model_from_spec
from gmmvit_deploy.models.families.family import Family
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.conftest import golden
from tests.models.families.small_models import Small, SmallExports
from tests.parity.faults import with_graph
from tests.planted import cait, deepvit, locality, others, rmt, vit_pytorch
from tests.planted.graph import GraphCopy, Planted

PLANTED: list[Planted] = [*locality.CASES, *cait.CASES, *rmt.CASES, *deepvit.CASES, *vit_pytorch.CASES, *others.CASES]


@cache
def _trained(path: Path) -> Model:
    bundle = open_bundle(path)
    return model_from_bundle(bundle.manifest, bundle.weights_path)


@pytest.mark.first(4)
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_mistake_is_caught_and_named(
    planted: Planted, small_exports: SmallExports, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    where = planted.where
    bundle = tensor_bundles[where] if isinstance(where, str) else small_exports.bundle(where)
    graph = GraphCopy(onnx.load(bundle.onnx_path), _trained(bundle.path))
    planted.plant(graph)
    copy = with_graph(bundle, tmp_path / "bundle", graph.proto())
    with OnnxRuntimeRunner(copy) as runner:
        report = check_parity(copy, [runner])
    (numeric,) = [check for check in report.runners[0].checks if check.name == "numeric"]
    assert numeric.verdict == "failed"
    assert numeric.reasons[-1].startswith(f"likely cause: {planted.name}; "), numeric.reasons[-1]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_mistake_of_a_family_is_planted(family: Family) -> None:
    planted = {case.name for case in PLANTED if case.family == family.name}
    assert {name for name, _ in family.network().mistakes} <= planted


def test_every_mistake_of_a_step_is_planted() -> None:
    planted = {case.name for case in PLANTED}
    mistakes = {
        name
        for where in {str(case.where): case.where for case in PLANTED}.values()
        for _, scores in attention_scores(_model(where))
        for _, step in scores.steps()
        for name, _ in step.mistakes()
    }
    assert "the learned temperature missing" in mistakes
    assert mistakes <= planted


def _model(where: Small | str) -> Model:
    if isinstance(where, Small):
        return model_from_spec(where.spec)
    case = golden(where)
    return load_checkpoint(case.path, case.hints).model
