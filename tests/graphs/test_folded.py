from __future__ import annotations

import copy

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs.declared import ATTENTION_KEY, ROLE_KEY
from gmmvit_deploy.graphs.folded import constant_nodes, prove_folded
from gmmvit_deploy.models.families.vit.model import ViT
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
def graph(folded: FoldedModel) -> onnx.ModelProto:
    return onnx_from_model(folded.model, preprocessing=None, max_batch=4)


def test_nothing_of_this_machine_is_in_the_graph(graph: onnx.ModelProto) -> None:
    data = graph.SerializeToString()
    assert b".py" not in data
    assert b"/" + b"home" not in data
    notes = {note.key for node in graph.graph.node for note in node.metadata_props}
    assert notes == {ROLE_KEY, ATTENTION_KEY}


def test_a_graph_of_other_masks_is_refused(graph: onnx.ModelProto, folded: FoldedModel) -> None:
    wrong, doubled = copy.deepcopy(folded), copy.deepcopy(graph)
    wrong.masks[1].constant[0, 0, 0] += 1e-6
    with pytest.raises(ExportError, match=r"blocks\.1\.attention: expected the mask .* once in the graph, got 0 times"):
        prove_folded(graph, wrong.masks, wrong.biases)
    doubled.graph.initializer.append(numpy_helper.from_array(folded.masks[0].constant.numpy(), "again"))
    with pytest.raises(ExportError, match="2 times"):
        prove_folded(doubled, folded.masks, folded.biases)


def test_layers_with_equal_masks_may_have_a_copy_each(graph: onnx.ModelProto, folded: FoldedModel) -> None:
    """The exporter shares equal constants only when they are small."""
    names = [record.constant for record in prove_folded(graph, folded.masks, folded.biases)[0]]
    equal, same = copy.deepcopy(graph), copy.deepcopy(folded)
    same.masks[1].constant.copy_(same.masks[0].constant)
    first, second = (next(tensor for tensor in equal.graph.initializer if tensor.name == name) for name in names)
    second.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(first), second.name))
    assert [record.constant for record in prove_folded(equal, same.masks, same.biases)[0]] == names
    for node in equal.graph.node:  # both layers read the first mask; nothing reads its copy
        node.input[:] = [names[0] if name == names[1] else name for name in node.input]
    with pytest.raises(ExportError, match="expected one Mul node in each layer"):
        prove_folded(equal, same.masks, same.biases)
    equal.graph.initializer.remove(second)
    assert [record.constant for record in prove_folded(equal, same.masks, same.biases)[0]] == [names[0], names[0]]


def test_a_graph_that_computes_constants_or_masks_is_refused(graph: onnx.ModelProto, folded: FoldedModel) -> None:
    name = prove_folded(graph, folded.masks, folded.biases)[0][0].constant
    for operator, read, message in (("Neg", name, "constants at run time: negated"), ("Einsum", "logits", "Einsum")):
        busy = copy.deepcopy(graph)
        busy.graph.node.append(onnx.helper.make_node(operator, [read], ["negated"]))
        assert constant_nodes(busy.graph) == (["negated (Neg)"] if operator == "Neg" else [])
        with pytest.raises(ExportError, match=message):
            prove_folded(busy, folded.masks, folded.biases)


@pytest.mark.nightly
@pytest.mark.integration
def test_equal_masks_of_two_layers_share_one_constant() -> None:
    model: ViT = small(MaskSpec(kind="elm"))
    for block in model.blocks:
        block.attention.scores.before.mask.weight = nn.Parameter(torch.full((16, 16), 0.5) + torch.eye(16))
    result = fold(model)
    records, _ = prove_folded(
        onnx_from_model(result.model, preprocessing=None, max_batch=4), result.masks, result.biases
    )
    assert len({record.constant for record in records}) == 1


@pytest.mark.parametrize("name", each_export(RELEASED))
def test_no_two_large_constants_are_equal(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    graph = onnx.load(tensor_bundles[name].onnx_path).graph
    shapes = {record.shape for record in (*tensor_bundles[name].manifest.masks, *tensor_bundles[name].manifest.biases)}
    seen = [i.raw_data for i in graph.initializer if tuple(i.dims) in shapes and i.data_type == onnx.TensorProto.FLOAT]
    assert len(seen) == len(set(seen))
