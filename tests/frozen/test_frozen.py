"""Rearranging the code changes no answer: the part of the frozen values of `values` that is fast to compute.

``python -m tests.frozen.check`` computes all values again: every precision, every engine form, every engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from gmmvit_deploy.artifacts import Bundle
from tests.conftest import RELEASED, Golden, golden
from tests.frozen import values
from tests.frozen.values import STORED, MerkleHashes, form_name, graph_hashes

FROZEN: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
SAME_MACHINE = values.machine() == FROZEN["machine"]
only_same_machine = pytest.mark.skipif(
    not SAME_MACHINE, reason=f"bits were frozen on {FROZEN['machine']}, this is {values.machine()}"
)
FAMILY_EXAMPLES = ("vit_gmm", "swin_gmm", "cait_gmm", "pit_gmm", "t2t_gmm")


def comparable(hashes: dict[str, Any]) -> dict[str, Any]:
    """Return the values to compare here: the bits of the weights only on the machine that froze them."""
    return hashes if SAME_MACHINE else {name: value for name, value in hashes.items() if name != "whole"}


def test_every_golden_checkpoint_is_frozen() -> None:
    assert set(FROZEN) == {"machine", *RELEASED}


@only_same_machine
def test_logits_are_the_frozen_bits(each_golden: Golden) -> None:
    assert values.logits_hash(each_golden) == FROZEN[each_golden.name]["logits"]


def test_inspect_gives_the_frozen_output(each_golden: Golden) -> None:
    assert values.inspected(each_golden) == FROZEN[each_golden.name]["inspect"]


@pytest.mark.parametrize("name", RELEASED)
def test_exported_graph_is_the_frozen_graph(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    exported = graph_hashes(onnx.load(tensor_bundles[name].onnx_path))
    assert comparable(exported) == comparable(FROZEN[name]["graphs"]["fp32"])


@pytest.mark.parametrize("name", RELEASED)
def test_mistakes_keep_their_names(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    now, frozen = values.mistakes(tensor_bundles[name]), FROZEN[name]["mistakes"]
    assert {mistake: known["named"] for mistake, known in now.items()} == {
        mistake: known["named"] for mistake, known in frozen.items()
    }
    if SAME_MACHINE:
        assert now == frozen


@pytest.mark.export
@pytest.mark.parametrize("name", FAMILY_EXAMPLES)
def test_quantised_engine_form_is_the_frozen_graph(name: str) -> None:
    """int8 with padded heads goes through every engine pass, the quantiser and the cast."""
    exported = graph_hashes(values.graph_from_golden(golden(name), "int8", padded=True))
    assert comparable(exported) == comparable(FROZEN[name]["graphs"][form_name("int8", padded=True)])


@pytest.mark.engine
@pytest.mark.export
def test_engine_has_the_frozen_layers(tmp_path: Path) -> None:
    built = values.engine_of(values.graph_from_golden(golden("vit_gmm"), "fp16", padded=True), "fp16", tmp_path)
    assert built == FROZEN["vit_gmm"]["engines"][form_name("fp16", padded=True)]


def test_hash_ignores_names_and_order_and_sees_values() -> None:
    def graph(names: tuple[str, str], factor: float) -> onnx.ModelProto:
        first, second = names
        return onnx.parser.parse_model(
            f"""<ir_version: 9, opset_import: ["": 20]>
            g (float[2] x) => (float[2] y) <float[1] {first} = {{{factor}}}, float[1] {second} = {{2.0}}>
            {{ a = Mul(x, {first}) b = Add(x, {second}) y = Sub(a, b) }}"""
        )

    def whole(proto: onnx.ModelProto, *, weights: bool) -> str:
        return MerkleHashes(proto, weights=weights)["y"]

    base = graph(("c", "d"), 3.0)
    renamed = graph(("p", "q"), 3.0)
    reordered = graph(("c", "d"), 3.0)
    nodes = [reordered.graph.node[index] for index in (1, 0, 2)]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del reordered.graph.node[:]
    reordered.graph.node.extend(copies)
    other = graph(("c", "d"), 3.5)
    for weights in (True, False):
        assert whole(base, weights=weights) == whole(renamed, weights=weights) == whole(reordered, weights=weights)
    assert whole(base, weights=True) != whole(other, weights=True)
    assert whole(base, weights=False) == whole(other, weights=False)
