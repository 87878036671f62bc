"""The matcher for both runtimes' graphs: which attentions the kernel supports, and why not the others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from onnx import TensorProto, helper, numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.graphs.wiring import Wiring
from gmmvit_deploy.runtimes import kernels
from gmmvit_deploy.runtimes import programs as runtime
from gmmvit_deploy.runtimes.kernels.matcher import MatchedAttention, Refusal, attentions_in, summary_of
from gmmvit_deploy.runtimes.kernels.onnx_view import attentions_of_kernel
from gmmvit_deploy.runtimes.kernels.openvino_view import OpenVinoView
from tests.conftest import RELEASED
from tests.runtimes.kernels.onnx_graphs import graph as onnx_graph
from tests.runtimes.kernels.test_masked_attention import _graph as openvino_graph

NOT_OVER_KEYS = "its softmax does not run over the keys, the last dimension"
EXPECTED: dict[str, tuple[int, list[str]]] = {
    **dict.fromkeys(("vit_plain", "vit_gmm", "vit_elm", "vit_gmm_img64"), (3, [])),
    **dict.fromkeys(("vit_gmm_256_tokens", "vit_gmm_head_dim", "vit_gmm_one_head"), (2, [])),
    **dict.fromkeys(("swin_plain", "swin_gmm"), (4, [])),
    "swin_gmm_whole_grid": (6, []),
    **dict.fromkeys(("cait_plain", "cait_gmm", "cait_elm"), (5, [])),
    **dict.fromkeys(("pit_plain", "pit_elm", "pit_gmm"), (4, [])),
    **dict.fromkeys(("t2t_plain", "t2t_gmm", "t2t_elm"), (2, [])),
}
"""Golden checkpoint → (attentions that the kernel takes, the reasons of the others), in both runtimes."""


def test_every_golden_checkpoint_is_expected() -> None:
    assert set(EXPECTED) == set(RELEASED)


@pytest.mark.cases
@pytest.mark.parametrize("name", RELEASED)
def test_what_the_kernel_takes_of_every_family(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    path = tensor_bundles[name].onnx_path
    proto = onnx.load(path)
    model = openvino.Core().read_model(path)
    in_onnx, in_openvino = attentions_of_kernel(proto), attentions_in(OpenVinoView(model))
    assert [type(match) for match in in_onnx] == [type(match) for match in in_openvino]
    assert [match.name for match in in_onnx] == [match.name for match in in_openvino]
    for matches in (in_onnx, in_openvino):
        taken = [match for match in matches if isinstance(match, MatchedAttention)]
        refused = [match.reason for match in matches if isinstance(match, Refusal)]
        assert (len(taken), refused) == EXPECTED[name]
    masked = {record.layer for record in tensor_bundles[name].manifest.masks}
    for ours, theirs in zip(in_onnx, in_openvino, strict=True):
        if isinstance(ours, MatchedAttention) and isinstance(theirs, MatchedAttention):
            assert (ours.mask is not None) == (ours.name in masked)
            assert (ours.heads, ours.tokens, ours.head_dim) == (theirs.heads, theirs.tokens, theirs.head_dim)
            assert ours.scale == theirs.scale
            assert [part.column for part in ours.parts] == [part.column for part in theirs.parts]
            for mine, other in zip((ours.mask, *ours.mixing), (theirs.mask, *theirs.mixing), strict=True):
                np.testing.assert_array_equal(mine, other)


def test_summary_gives_each_reason_once(tensor_bundles: dict[str, Bundle]) -> None:
    taken = attentions_of_kernel(onnx.load(tensor_bundles["cait_gmm"].onnx_path))
    refused = attentions_of_kernel(onnx.load(tensor_bundles["eanet_performer"].onnx_path))
    names = ", ".join(match.name for match in refused)
    assert summary_of([*taken, *refused]) == f"5 of 9; not: {names} ({NOT_OVER_KEYS})"
    assert summary_of(taken) == "5 of 5"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"mask": (1, 20, 20)}, "its mask has shape (1, 20, 20), expected (2, 20, 20)"),
        ({"bias": (1, 20, 20)}, "its bias has shape (1, 20, 20), expected (2, 20, 20)"),
        ({"bias": (3, 2, 20, 20)}, "its bias has shape (3, 2, 20, 20), expected (2, 20, 20)"),
        ({"windows": [4], "axis": 3}, NOT_OVER_KEYS),
        (
            {"windows": [4], "joined": True, "mask": (8, 20, 20)},
            "its windows have different masks, expected the same masks for all windows",
        ),
        (
            {"scale": (2, 1, 1)},
            "its queries come from multiplication, expected a Reshape and a Transpose that split into heads",
        ),
    ],
    ids=str,
)
def test_both_runtimes_give_the_same_reason(other: dict[str, Any], reason: str) -> None:
    model = openvino_graph(**other)
    for matches in (attentions_of_kernel(onnx_graph(**other)), attentions_in(OpenVinoView(model))):
        (match,) = matches
        assert isinstance(match, Refusal)
        assert match.reason == reason


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"weights_are_used": True},
            "its attention weights are read by matrix product, Relu, expected only the matrix product with V",
        ),
        ({"no_shapes": True}, "the graph does not state the shape of the tensor that its queries are cut from"),
        (
            {"type": TensorProto.FLOAT16},
            "its mask, scale or bias is float16, a type that the kernel does not support",
        ),
    ],
    ids=str,
)
def test_reasons_in_onnx_alone(other: dict[str, Any], reason: str) -> None:
    (match,) = attentions_of_kernel(onnx_graph(**other))
    assert match == Refusal(match.name, reason)


@pytest.mark.parametrize(
    ("side", "operator"), [("before", "BatchNormalization"), ("before", "Relu"), ("after", "Relu"), ("after", "Cast")]
)
def test_a_step_that_the_kernel_does_not_know_is_named(side: str, operator: str) -> None:
    proto = onnx_graph()
    (softmax,) = [node for node in proto.graph.node if node.op_type == "Softmax"]
    if side == "before":
        step = helper.make_node(operator, [softmax.input[0]], ["stepped"])
        softmax.input[0] = "stepped"
    else:
        step = helper.make_node(operator, ["stepped"], [softmax.output[0]])
        softmax.output[0] = "stepped"
    proto.graph.node.append(step)
    (match,) = attentions_of_kernel(proto)
    assert isinstance(match, Refusal)
    if operator == "Cast":
        assert match.reason == f"a cast stands {side} its softmax, expected the same type throughout the attention"
    else:
        before, after = "Q Kᵀ, a mask, a bias or head mixing", "head mixing or the matrix product with V"
        expected = before if side == "before" else after
        assert match.reason == f"{operator} stands {side} its softmax, expected {expected}"


def test_a_query_that_all_images_share_is_refused() -> None:
    proto = onnx_graph()
    proto.graph.node[[node.op_type for node in proto.graph.node].index("Reshape")].input[0] = "learned"
    proto.graph.node.append(helper.make_node("Identity", ["rows"], ["learned"]))
    rows = np.zeros((1, 20, 32), np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(rows, "rows"))
    proto.graph.value_info.append(helper.make_tensor_value_info("learned", TensorProto.FLOAT, rows.shape))
    (match,) = attentions_of_kernel(proto)
    assert match == Refusal(match.name, "its queries, keys and values differ in the batch dimension")


def test_two_masks_are_refused() -> None:
    proto = onnx_graph()
    (softmax,) = [node for node in proto.graph.node if node.op_type == "Softmax"]
    proto.graph.node.append(helper.make_node("Mul", [softmax.input[0], "mask"], ["twice"]))
    softmax.input[0] = "twice"
    (match,) = attentions_of_kernel(proto)
    assert isinstance(match, Refusal)
    assert (
        match.reason == "the multiplication before its softmax is in an unexpected place: "
        "expected Q Kᵀ, then at most a mask, then at most a bias"
    )


def test_wiring_of_a_small_graph() -> None:
    wiring = Wiring(onnx_graph().graph)
    split = wiring.maker["q"]
    assert (split.op_type, wiring.made_by("q", "Split"), wiring.made_by("q", "Relu")) == ("Split", split, None)
    assert wiring.only_reader("q") is wiring.only_reader("q", "Reshape") is wiring.maker["q.apart"]
    assert wiring.only_reader("q", "MatMul") is None
    assert wiring.only_reader("apart") is None  # three nodes read it
    assert wiring.inner_shape("x") == (20, 96)
    assert (wiring.inner_shape("weights"), wiring.element_type("weights")) == (None, None)
    assert wiring.element_type("x") == TensorProto.FLOAT
    assert wiring.is_product(wiring.maker["scores"])
    assert wiring.constant_input(wiring.maker["masked"]) == 0
    assert wiring.computed_inputs(wiring.maker["masked"]) == ["scores"]
    mask = wiring.array("mask")
    assert mask is not None
    assert mask.shape == (2, 20, 20)
    assert wiring.array("x") is None


def test_what_a_server_copies_imports_alone(tmp_path: Path) -> None:
    """The module imports in a new interpreter without gmmvit_deploy, as inside Triton."""
    package, other = tmp_path / "gmmvit_openvino", tmp_path / "gmmvit_onnxruntime"
    package.mkdir()
    other.mkdir()
    copied = ("openvino_kernels.py", "openvino_view.py", "matcher.py", "prepared_masks.py", "refusal_reasons.py")
    for name in copied:
        shutil.copyfile(Path(kernels.__path__[0]) / name, package / name)
    programs = ((package, ("openvino_program.py",)), (other, ("onnxruntime_program.py", "int8_products.py")))
    for folder, names in programs:
        for name in (*names, "cores.py"):
            shutil.copyfile(Path(runtime.__path__[0]) / name, folder / name)
    onnx.save(onnx_graph(), tmp_path / "model.onnx")
    code = (
        "import sys; sys.path.insert(0, '.'); sys.modules['gmmvit_deploy'] = None\n"
        "import openvino, gmmvit_onnxruntime.onnxruntime_program\n"
        "from gmmvit_openvino import matcher, openvino_kernels, openvino_program, openvino_view\n"
        "model = openvino.Core().read_model('model.onnx')\n"
        "print(matcher.summary_of(matcher.attentions_in(openvino_view.OpenVinoView(model))))\n"
        "print([name for name in sys.modules if name.startswith('gmmvit_deploy.')])\n"
    )
    answer = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (0, "1 of 1\n[]\n"), answer.stderr
