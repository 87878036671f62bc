from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs.declared import ATTENTION_KEY, ROLE_KEY
from gmmvit_deploy.graphs.folded import constant_nodes, prove_folded
from gmmvit_deploy.graphs.wiring import add_constant, stored
from gmmvit_deploy.models.folding.fold import FoldedModel, fold
from gmmvit_deploy.models.specs import MaskSpec
from tests.conftest import RELEASED
from tests.golden_files import each_export
from tests.models.folding.test_passes import small

GMM = MaskSpec(kind="gmm", kernels=2)


@pytest.fixture(scope="module")
def folded() -> FoldedModel:
    torch.manual_seed(0)
    return fold(small(GMM))


@pytest.fixture(scope="module")
def graph(folded: FoldedModel) -> ir.Model:
    return onnx_from_model(folded.model, preprocessing=None, max_batch=4)


def test_nothing_of_this_machine_is_in_the_graph(graph: ir.Model) -> None:
    data = ir.to_proto(graph).SerializeToString()
    assert b".py" not in data
    assert b"/" + b"home" not in data
    notes = {key for node in graph.graph for key in node.metadata_props}
    assert notes == {ROLE_KEY, ATTENTION_KEY}


def test_a_graph_of_other_masks_is_refused(graph: ir.Model, folded: FoldedModel) -> None:
    wrong, doubled = copy.deepcopy(folded), graph.clone()
    wrong.masks[1].constant[0, 0, 0] += 1e-6
    with pytest.raises(ExportError, match=r"blocks\.1\.attention: expected the mask .* once in the graph, got 0 times"):
        prove_folded(graph.graph, wrong.masks, wrong.biases)
    add_constant(doubled.graph, "again", folded.masks[0].constant.numpy())
    with pytest.raises(ExportError, match="2 times"):
        prove_folded(doubled.graph, folded.masks, folded.biases)


def test_layers_with_equal_masks_may_have_a_copy_each(graph: ir.Model, folded: FoldedModel) -> None:
    """The exporter shares equal constants only when they are small."""
    names = [record.constant for record in prove_folded(graph.graph, folded.masks, folded.biases)[0]]
    equal, same = graph.clone(), copy.deepcopy(folded)
    same.masks[1].constant.copy_(same.masks[0].constant)
    first, second = (equal.graph.initializers[name] for name in names)
    second.const_value = first.const_value
    assert [record.constant for record in prove_folded(equal.graph, same.masks, same.biases)[0]] == names
    second.replace_all_uses_with(first)  # both layers read the first mask; nothing reads its copy
    with pytest.raises(ExportError, match="expected one Mul node in each layer"):
        prove_folded(equal.graph, same.masks, same.biases)
    del equal.graph.initializers[names[1]]
    assert [record.constant for record in prove_folded(equal.graph, same.masks, same.biases)[0]] == [names[0], names[0]]


def test_a_graph_that_computes_constants_or_masks_is_refused(graph: ir.Model, folded: FoldedModel) -> None:
    name = prove_folded(graph.graph, folded.masks, folded.biases)[0][0].constant
    for operator, read, message in (("Neg", name, "constants at run time: node_Neg_0"), ("Einsum", "logits", "Einsum")):
        busy = graph.clone()
        value = busy.graph.initializers.get(read) or busy.graph.outputs[0]
        busy.graph.append(ir.node(operator, [value], outputs=[ir.Value(name="negated")]))
        assert constant_nodes(busy.graph) == (["node_Neg_0 (Neg)"] if operator == "Neg" else [])
        with pytest.raises(ExportError, match=message):
            prove_folded(busy.graph, folded.masks, folded.biases)


@pytest.mark.parametrize("name", each_export(RELEASED))
def test_no_two_large_constants_are_equal(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    graph = ir.load(tensor_bundles[name].onnx_path).graph
    shapes = {record.shape for record in (*tensor_bundles[name].manifest.masks, *tensor_bundles[name].manifest.biases)}
    large = [values for value in graph.initializers.values() if (values := stored(value)).shape in shapes]
    seen = [values.tobytes() for values in large if values.dtype == np.float32]
    assert len(seen) == len(set(seen))
