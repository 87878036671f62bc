"""Our attention kernel computes the formula in every form that it supports, and no other form is replaced."""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino
import pytest
from ml_dtypes import bfloat16
from openvino import opset13 as ops

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.specs import MaskKind
from gmmvit_deploy.parity.inputs import fresh_inputs
from gmmvit_deploy.runtimes.kernels import libraries as compiling
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.kernels.openvino_kernels import kernels_from
from gmmvit_deploy.runtimes.kernels.prepared_masks import prepared_bias, prepared_mask
from gmmvit_deploy.runtimes.programs import openvino as runner_module
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.programs.openvino_program import OpenVinoProgram
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.openvino import OpenVinoRunner
from tests.conftest import swin_graph
from tests.runtimes.kernels.kernel_arguments import MaskedAttention

_KERNELS, _WHY = our_kernels("fp32")
needs_kernel = pytest.mark.skipif(
    # A kernel that does not compile is a failure, and no reason to skip.
    _KERNELS is None and any(why in _WHY for why in ("this processor has neither", "x86-64", "no C++ compiler")),
    reason=f"no kernel here: {_WHY}",
)
needs_bf16 = pytest.mark.skipif(
    _KERNELS is None or our_kernels("bf16")[1] != "bf16", reason="our kernels have no bf16 on this CPU"
)
F32, BF16 = 1, 2
LOG2_E = np.float32(np.log2(np.e))


@dataclass
class Case:
    batch: int
    heads: int
    n: int
    d: int
    masked: bool = True
    mixed: bool = False
    mixed_after: bool = False  # only after softmax
    on_grid: bool = False
    windows: int = 0  # that have a bias each
    one_query: bool = False  # the first token's
    shared: bool = False  # the mask, or the bias, by all heads

    def __post_init__(self) -> None:
        make = np.random.default_rng(self.n)
        self.queries = 1 if self.one_query else self.n
        self.stacked = make.standard_normal((self.batch, self.n, 3 * self.heads * self.d), dtype=np.float32)
        heads = 1 if self.shared else self.heads
        self.mask = make.standard_normal((heads, self.queries, self.n), dtype=np.float32) if self.masked else None
        self.scale = np.float32(self.d**-0.5)
        if self.on_grid:
            self.mask = mask_on_grid(heads, self.n) * self.scale
        self.mixing = (
            make.standard_normal((2, self.heads, self.heads), dtype=np.float32)
            if self.mixed or self.mixed_after
            else None
        )
        shape = (self.windows, heads, self.queries, self.n)
        self.bias = make.standard_normal(shape, dtype=np.float32) if self.windows else None
        if self.bias is not None:
            self.bias[-1, :, 0, 1:] = -100  # a token that the roll moved next to tokens of another region

    def computed(
        self, arithmetic: int, pieces: list[int] | None = None, step: float | None = None
    ) -> tuple[int, np.ndarray]:
        """pieces: where a call ends and the next begins.  step: of int8.  Returns (status of the last call, output)."""
        library = loaded()
        columns = self.heads * self.d
        shape = (self.batch, self.queries, columns)
        queries = np.ascontiguousarray(self.stacked[:, : self.queries, :columns])
        out = np.full(shape, np.nan, np.float32) if step is None else np.full(shape, 99, np.int8)
        mask = None if self.mask is None else prepared_mask(self.mask, "bf16" if arithmetic == BF16 else "f32")
        assert mask is None or bool(mask.grid) == self.on_grid
        bias = None
        if self.bias is not None:
            given = self.bias.reshape(self.bias.shape[-2:]) if self.shared else self.bias
            bias = prepared_bias(given, self.heads, (self.queries, self.n), (self.windows,))
        start = self.stacked.ctypes.data
        what = MaskedAttention(
            q=queries.ctypes.data,
            k=start + 4 * columns,
            v=start + 8 * columns,
            out=out.ctypes.data if step is None else None,
            quantised=None if step is None else out.ctypes.data,
            steps=0 if step is None else 1 / step,
            mask=None if mask is None else mask.numbers.ctypes.data,
            bias=None if bias is None else bias.ctypes.data,
            windows=self.windows,
            before=None if self.mixing is None or self.mixed_after else self.mixing[0].ctypes.data,
            after=None if self.mixing is None else self.mixing[1].ctypes.data,
            q_row=columns,
            k_row=3 * columns,
            v_row=3 * columns,
            batch=self.batch,
            heads=self.heads,
            queries=self.queries,
            n=self.n,
            d=self.d,
            mask_heads=0 if mask is None else len(mask.numbers),
            bias_heads=0 if bias is None else bias.shape[1],
            arithmetic=arithmetic,
            grid=0 if mask is None else mask.grid,
            scale=self.scale * LOG2_E,
        )
        ends = [0, *(pieces or []), library.masked_attention_pieces(ctypes.byref(what))]
        returned = [
            library.masked_attention(ctypes.byref(what), ctypes.c_int64(first), ctypes.c_int64(last))
            for first, last in itertools.pairwise(ends)
        ]
        return max(returned), out

    def mask_of(self, rounded: Any) -> Any:
        assert self.mask is not None
        if rounded is np.float64:
            return self.mask
        return (self.mask * LOG2_E).astype(np.float16).astype(np.float64) / LOG2_E

    def formula(self, rounded: Any = np.float64) -> tuple[np.ndarray, float]:
        """softmax(M ∘ Q Kᵀ) V in float64, of Q, K, V and weights that were ``rounded``; the greatest weight · value."""
        shape = (self.batch, self.n, 3, self.heads, self.d)
        q, k, v = self.stacked.astype(rounded).astype(np.float64).reshape(shape).transpose(2, 0, 3, 1, 4)
        q = q[:, :, : self.queries]
        scores = (q @ k.swapaxes(-1, -2)) * (self.scale if self.mask is None else self.mask_of(rounded))
        if self.bias is not None:
            scores += self.bias[np.arange(self.batch) % self.windows]
        if self.mixing is not None and not self.mixed_after:
            scores = np.einsum("bhij,hg->bgij", scores, self.mixing[0])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        if self.mixing is None:
            after = weights.astype(rounded).astype(np.float64) / total
        else:
            after = np.einsum("bhij,hg->bgij", weights / total, self.mixing[1]).astype(rounded).astype(np.float64)
        mixed = (after @ v).transpose(0, 2, 1, 3).reshape(self.batch, self.queries, -1)
        return mixed, float(np.abs(after).max() * np.abs(v).max())


def mask_on_grid(heads: int, n: int) -> np.ndarray:
    """Return (H, n, n): random, but equal for equal offsets in rows and columns; constant for the class token."""
    make = np.random.default_rng(n)
    g = math.isqrt(n)
    rows, columns = np.divmod(np.arange(g * g), g)
    apart = make.standard_normal((heads, 2 * g - 1, 2 * g - 1), dtype=np.float32)
    mask = np.empty((heads, n, n), np.float32)
    mask[:] = make.standard_normal((heads, 1, 1), dtype=np.float32)
    mask[:, -g * g :, -g * g :] = apart[:, rows[:, None] - rows + g - 1, columns[:, None] - columns + g - 1]
    return mask


def loaded() -> ctypes.CDLL:
    library = ctypes.CDLL(str(openvino_library()[0]))
    library.masked_attention_pieces.restype = ctypes.c_int64
    return library


CASES = [
    Case(3, 12, 64, 16),
    Case(2, 2, 257, 48),  # four tiles and a further query; every block has remaining keys
    Case(2, 3, 65, 32),
    Case(1, 8, 17, 48),
    Case(2, 1, 1, 16),
    Case(1, 2, 2, 64),
    Case(2, 5, 47, 16),  # three vectors of queries
    Case(2, 12, 64, 16, on_grid=True),
    Case(1, 2, 65, 32, on_grid=True),
    Case(2, 2, 257, 48, on_grid=True),  # a class token, and tiles that begin within a row
    Case(1, 2, 196, 16, on_grid=True),  # rows of 14, which is no part of a vector
    Case(1, 3, 50, 32, on_grid=True),
    Case(2, 3, 36, 16, on_grid=True),
    Case(1, 2, 30, 16, masked=False),
    Case(8, 3, 16, 32, windows=4),
    Case(4, 2, 49, 32, windows=2, on_grid=True),  # a window of 7 × 7, of which 15 queries are padding
    Case(3, 2, 16, 16, windows=3, masked=False),
    Case(2, 2, 100, 16, windows=1),  # two tiles, of which the second is narrower
    Case(2, 4, 64, 48, mixed=True),
    Case(1, 8, 33, 16, mixed=True),
    Case(2, 4, 64, 48, mixed=True, on_grid=True),
    Case(1, 4, 65, 32, mixed=True),  # a single image: half a tile at once
    Case(1, 4, 257, 16, mixed=True, on_grid=True),
    Case(1, 2, 101, 16, mixed=True, on_grid=True),
    Case(1, 6, 129, 16, mixed=True, masked=False),
    Case(1, 16, 3, 16, mixed=True),
    Case(2, 12, 65, 32, mixed=True, masked=False),
    Case(2, 12, 65, 32, mixed_after=True, masked=False),
    Case(1, 12, 130, 16, mixed_after=True, masked=False),
    Case(3, 3, 50, 32, mixed_after=True, on_grid=True),
    Case(1, 4, 33, 16, mixed_after=True),
    # head dims that are no multiple of 16
    Case(2, 12, 65, 33, masked=False),
    Case(1, 3, 197, 35, mixed_after=True, masked=False),
    Case(2, 3, 65, 12),
    Case(2, 2, 64, 20, on_grid=True),
    Case(3, 4, 17, 8, mixed=True),
    Case(4, 3, 16, 6, windows=2, masked=False),
    Case(1, 2, 30, 1),
    # a single query
    Case(2, 4, 64, 48, mixed=True, masked=False, one_query=True),
    Case(1, 8, 197, 33, masked=False, one_query=True),
    Case(2, 3, 65, 32, one_query=True),
    Case(3, 2, 50, 16, one_query=True, masked=False, windows=3),
    Case(1, 2, 1, 16, one_query=True, shared=True),
    # a mask, or a bias, of all heads
    Case(2, 3, 64, 32, shared=True),
    Case(2, 3, 65, 20, shared=True, on_grid=True),
    Case(1, 4, 100, 16, shared=True, mixed=True, on_grid=True),
    Case(3, 3, 65, 16, shared=True, windows=1, masked=False),
]


MIXED = next(case for case in CASES if case.mixed)
MIXED_AFTER = next(case for case in CASES if case.mixed_after)
WINDOWS = next(case for case in CASES if case.windows)
ODD = [case for case in CASES if case.d in (12, 33, 35)]


def _id(case: Case) -> str:
    kinds = ("masked", "mixed", "mixed_after", "on_grid", "windows", "one_query", "shared")
    kinds = [kind for kind in kinds if getattr(case, kind)]
    return "-".join([*(str(size) for size in (case.batch, case.heads, case.n, case.d)), *kinds])


@needs_kernel
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_float32_is_the_formula(case: Case) -> None:
    failed, output = case.computed(F32)
    truth, most = case.formula()
    assert failed == 0
    np.testing.assert_allclose(output, truth, atol=2e-6 * max(1.0, most))


@needs_kernel
@needs_bf16
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_bf16_is_the_formula_of_rounded_numbers(case: Case) -> None:
    failed, output = case.computed(BF16)
    truth, most = case.formula(bfloat16)
    assert failed == 0
    # 2^x is 8e-5 off, so a weight beside a rounding boundary may fall to its other side: 2⁻⁸ of it.
    np.testing.assert_allclose(output, truth, atol=2**-8 * most)
    off = [float(np.sqrt(np.mean((output - reference) ** 2))) for reference in (truth, case.formula()[0])]
    if case.n > 2:
        assert off[0] < off[1] / 3  # much nearer to the formula of rounded numbers


@needs_kernel
@pytest.mark.parametrize("case", [CASES[0], CASES[1], MIXED, MIXED_AFTER, WINDOWS], ids=_id)
def test_pieces_are_the_whole(case: Case) -> None:
    whole = case.computed(F32)[1]
    cut = case.computed(F32, pieces=[1])[1]  # which may be within a head's tiles
    np.testing.assert_array_equal(whole, cut)


@needs_kernel
@pytest.mark.parametrize("arithmetic", [F32, pytest.param(BF16, marks=needs_bf16)])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], MIXED, MIXED_AFTER, *ODD], ids=_id)
def test_quantised_on_its_way_out(case: Case, arithmetic: int) -> None:
    plain = case.computed(arithmetic)[1]
    step = float(np.abs(plain).max()) / 100  # a few beyond 127 below
    for spacing in (step, step / 2):
        failed, output = case.computed(arithmetic, step=spacing)
        steps = plain * (1 / np.float32(spacing))
        assert failed == 0
        near_a_half = np.abs(steps - np.floor(steps) - 0.5) < 1e-4
        assert (output == np.clip(np.rint(steps), -128, 127))[~near_a_half].all()
    assert (np.abs(output) >= 127).any()


@needs_kernel
def test_scores_that_overflow_a_plain_exponential() -> None:
    case = Case(1, 1, 40, 16)
    case.stacked *= 30
    failed, output = case.computed(F32)
    assert failed == 0
    truth, most = case.formula()
    np.testing.assert_allclose(output, truth, atol=2e-4 * most)


@needs_kernel
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 17, 4, 16, mixed=True),
        Case(1, 17, 4, 16, mixed_after=True),
        Case(1, 2, 4, 16, mixed=True, windows=1),
        Case(1, 2, 4, 16, mixed_after=True, windows=1),
    ],
    ids=_id,
)
def test_what_it_does_not_take(case: Case) -> None:
    failed, output = case.computed(F32)
    assert failed == 1
    assert np.isnan(output).all()  # nothing was written


@needs_kernel
def test_masks_for_some_heads_are_refused() -> None:
    case = Case(1, 3, 4, 16)
    assert case.mask is not None
    case.mask = case.mask[:2]
    assert case.computed(F32)[0] == 1


@needs_kernel
def test_an_unknown_arithmetic_is_refused() -> None:
    assert Case(1, 1, 4, 16).computed(3)[0] == 1


# ---- in a graph ------------------------------------------------------------------------------------------------


@pytest.mark.first(1)
@needs_kernel
@pytest.mark.parametrize(
    ("name", "some"),
    [
        *((name, True) for name in ("vit_gmm", "cait_gmm", "t2t_gmm", "swin_gmm", "vit_elm", "deepvit_cnn_scaled")),
        ("eanet_performer", False),  # its attentions have no Q Kᵀ
    ],
)
def test_the_fused_graph_gives_the_same_answers(
    name: str, some: bool, tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tensor_bundles[name]
    inputs = fresh_inputs(bundle, 37)
    with open_runner("openvino", bundle) as runner:
        assert isinstance(runner, OpenVinoRunner)
        assert runner.program.fused_attentions == 0
        assert runner.settings["attention"] == "OpenVINO's"
        theirs = runner.rows(inputs)
    if not some:
        with pytest.raises(InputError, match="our kernel takes no attention of this graph"):
            open_runner("openvino+kernels", bundle)
        return
    with open_runner("openvino+kernels", bundle) as runner:
        assert isinstance(runner, OpenVinoRunner)
        assert runner.program.fused_attentions > 0
        assert runner.settings["attention"] == "our own, f32"
        ours = runner.rows(inputs)
        assert "Reference ref_f32" in runner.program.kernels
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    monkeypatch.setattr(runner_module, "openvino_library", lambda: (None, "switched off"))
    with pytest.raises(InputError, match=r"runner openvino\+kernels cannot run here: switched off"):
        open_runner("openvino+kernels", bundle)


@pytest.mark.rest
@needs_kernel
@pytest.mark.parametrize("kind", ["gmm", "plain"])
@pytest.mark.export
def test_windows_that_shift(kind: MaskKind, tmp_path: Path) -> None:
    path = swin_graph(tmp_path, kind)
    ours = OpenVinoProgram(str(path), hint="f32", kernels=_KERNELS)
    assert ours.fused_attentions == 4
    images = np.random.default_rng(1).standard_normal((5, 3, 16, 16), dtype=np.float32)
    theirs = OpenVinoProgram(str(path), hint="f32").run(images)
    for batch in (1, 5):
        np.testing.assert_allclose(ours.run(images[:batch]), theirs[:batch], atol=2e-5)
    kernels, arithmetic = our_kernels("bf16")
    if arithmetic == "bf16":
        rounded = OpenVinoProgram(str(path), hint="bf16", kernels=kernels)
        np.testing.assert_allclose(rounded.run(images), theirs, atol=0.03 * float(np.abs(theirs).max()))
        assert rounded.kernels["Reference ref_bf16"] == 4  # which read and write bf16


def _graph(**other: Any) -> openvino.Model:
    """Return a masked attention as an exporter writes it.  other: changes of the form."""
    heads, n, d = 2, 20, other.get("d", 16)
    make = np.random.default_rng(1)
    windows = other.get("windows", [])
    stacked = ops.parameter([-1, *windows, n, 3 * heads * d], openvino.Type.f32)
    projected = stacked
    if other.get("projected"):
        weights = make.standard_normal((3 * heads * d, 3 * heads * d), dtype=np.float32) / 10
        projected = ops.matmul(stacked, ops.constant(weights), False, False)
    parts = ops.split(projected, ops.constant(2 + len(windows)), 3).outputs()

    def turned(value: Any, order: list[int]) -> Any:
        inner = [place + len(windows) for place in order]
        return ops.transpose(value, ops.constant([*range(1 + len(windows)), *inner]))

    def apart(value: Any, order: list[int]) -> Any:
        shaped = ops.reshape(value, ops.constant([0, *windows, n, heads, d]), special_zero=True)
        return turned(shaped, order)

    if other.get("joined"):  # windows and heads in a single dimension, as in the int8 graphs of Swin

        def join(value: Any) -> Any:
            return ops.reshape(value, ops.constant([0, windows[0] * heads, n, d]), special_zero=True)

        query, key, value = (join(apart(part, [2, 1, 3])) for part in parts)
        key = ops.transpose(key, ops.constant([0, 1, 3, 2]))
    else:
        query = apart(parts[0], [2, 1, 3])
        key = apart(parts[1], [2, 3, 1])
        value = apart(parts[2], [2, 1, 3])
    if "scale" in other:
        query = ops.multiply(query, ops.constant(np.full(other["scale"], 0.25, np.float32)))
    scores = ops.matmul(query, key, False, False)
    mask = make.standard_normal(other.get("mask", (heads, n, n)), dtype=np.float32) * np.float32(other.get("times", 1))
    mask = np.tile(mask, (other.get("tiled", 1), *[1] * (mask.ndim - 1))) if mask.ndim else mask
    scores = ops.multiply(scores, ops.constant(mask))
    if "bias" in other:
        scores = ops.add(scores, ops.constant(make.standard_normal(other["bias"], dtype=np.float32)))
    weights = ops.softmax(scores, other.get("axis", -1))
    product = ops.matmul(weights, value, False, False)
    if other.get("joined"):
        product = ops.reshape(
            product, ops.constant([0, *other.get("parted", [windows[0], heads, n, d])]), special_zero=True
        )
    elif other.get("reshaped"):  # another output: tokens and heads in the wrong order
        product = ops.reshape(product, ops.constant([0, n, heads, d]), special_zero=True)
    mixed = turned(product, [2, 1, 3])
    merged = other.get("last", [*windows, n, heads * d])
    last = ops.reshape(mixed, ops.constant([0 if "last" not in other else -1, *merged]), special_zero=True)
    for step in other.get("quantised", ()):
        ends = [ops.constant(np.float32(bound)) for bound in (-128 * step, 127 * step, -128, 127)]
        grid = ops.convert(ops.fake_quantize(last, *ends, 256), "i8")
        last = ops.multiply(ops.convert(grid, "f32"), ops.constant(np.float32(step)))
    outputs = [last, ops.relu(weights)] if other.get("weights_are_used") else [last]
    return openvino.Model([node.output(0) for node in outputs], [stacked], "attention")


@pytest.mark.first(2)
@needs_kernel
@pytest.mark.parametrize(
    ("other", "replaced"),
    [
        ({}, 1),
        ({"mask": ()}, 1),  # a plain attention's scale
        ({"mask": (1, 2, 20, 20)}, 1),
        ({"mask": (20, 20)}, 1),  # all heads share the mask
        ({"mask": (1, 20, 20)}, 0),
        ({"mask": (2, 20, 1)}, 0),
        ({"d": 8}, 1),
        ({"d": 33, "quantised": [0.02]}, 1),
        ({"quantised": [0.02]}, 1),  # but no other form is: the attention stays OpenVINO's
        ({"quantised": [0.02, 0.04]}, 1),
        ({"bias": (2, 20, 20)}, 1),
        ({"bias": (1, 2, 20, 20), "mask": ()}, 1),
        ({"bias": (1, 20, 20)}, 0),
        ({"bias": (3, 2, 20, 20)}, 0),  # a bias for each of three images
        ({"windows": [4]}, 1),
        ({"windows": [4], "mask": (1, 1, 2, 20, 20), "bias": (2, 20, 20)}, 1),
        ({"windows": [4], "mask": (), "bias": (4, 2, 20, 20)}, 1),
        ({"windows": [4], "bias": (1, 4, 2, 20, 20), "quantised": [0.02]}, 1),
        ({"windows": [4], "mask": (4, 2, 20, 20)}, 0),
        ({"windows": [4], "axis": 3}, 0),
        ({"windows": [4], "scale": (), "mask": (), "bias": (4, 2, 20, 20)}, 1),  # of Q alone
        ({"windows": [4], "joined": True, "tiled": 4, "bias": (8, 20, 20)}, 1),
        ({"windows": [4], "joined": True, "mask": (), "bias": (1, 8, 20, 20), "axis": 3}, 1),
        ({"windows": [4], "joined": True, "mask": (20, 20)}, 1),
        ({"windows": [4], "joined": True, "mask": (8, 20, 20)}, 0),  # another for each window
        ({"windows": [4], "joined": True, "mask": (), "parted": [2, 4, 20, 16], "last": [4, 20, 32]}, 0),
        ({"reshaped": True, "last": [20, 32]}, 0),
        ({"windows": [4], "joined": True, "tiled": 4, "bias": (8, 20, 20), "quantised": [0.02]}, 1),
        ({"scale": (1, 1, 1, 1)}, 1),
        ({"scale": (2, 1, 1)}, 0),  # another for each head
        ({"axis": 2}, 0),
        ({"weights_are_used": True}, 0),
    ],
    ids=str,
)
def test_only_masked_attention_is_replaced(other: dict[str, Any], replaced: int) -> None:
    library, _ = openvino_library()
    assert library is not None
    kernels, arithmetic = kernels_from(library, "f32")
    assert kernels is not None
    assert arithmetic == "f32"
    plain, model = _graph(**other), _graph(**other)
    assert kernels.fuse_attention(model) == replaced
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert kinds.count("MaskedAttention") == replaced
    assert kinds.count("FakeQuantize") == (1 if "quantised" in other else 0)
    assert ("Softmax" in kinds) == (not replaced)
    assert ("Split" in kinds) == (not replaced)
    batch = np.random.default_rng(2).standard_normal((3, *plain.inputs[0].get_partial_shape().get_max_shape()[1:]))
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    answers = [
        openvino.compile_model(network, "CPU", settings)(batch.astype(np.float32))[0].copy()
        for network in (plain, model)
    ]
    # A value near the middle of two steps may fall to the other.
    off = np.abs(answers[1] - answers[0])
    assert off.max() <= max(1e-5, 1.01 * max(other.get("quantised", [0])))
    assert np.mean(off > 1e-5) < 0.01


@needs_kernel
@needs_bf16
@pytest.mark.parametrize("quantised", [(), (0.02,)])
def test_with_the_hint_bf16_nothing_is_converted_around_the_attention(quantised: tuple[float, ...]) -> None:
    library, _ = openvino_library()
    assert library is not None
    kernels = kernels_from(library, "bf16")[0]
    assert kernels is not None
    form: dict[str, Any] = {"d": 33, "projected": True}
    if quantised:
        form["quantised"] = (*quantised, *quantised)  # the second keeps OpenVINO's products in int8
    models = {hint: _graph(**form) for hint in ("f32", "bf16")}
    for hint, model in models.items():
        assert kernels.fuse_attention(model, hint=hint) == 1  # type: ignore[arg-type]
        (fused,) = [node for node in model.get_ordered_ops() if node.get_type_name() == "MaskedAttention"]
        assert fused.get_input_element_type(0).get_type_name() == hint
        assert fused.get_output_element_type(0).get_type_name() == ("i8" if quantised else hint)
    if quantised:
        return
    batch = np.random.default_rng(2).standard_normal((3, 20, 198), dtype=np.float32) / 4
    compiled = [openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}) for model in models.values()]
    # The product's output is bfloat16 in both, and the attention's output is rounded once more, to the same step.
    np.testing.assert_allclose(compiled[1](batch)[0], compiled[0](batch)[0], rtol=2**-7, atol=1e-6)


@needs_kernel
@needs_bf16
def test_a_mask_beyond_float16_is_kept_in_float32() -> None:
    library, _ = openvino_library()
    assert library is not None
    kernels = kernels_from(library, "bf16")[0]
    assert kernels is not None
    for times, arithmetic in ((1, BF16), (2e4, F32)):
        model = _graph(times=times)
        assert kernels.fuse_attention(model) == 1
        (fused,) = [node for node in model.get_ordered_ops() if node.get_type_name() == "MaskedAttention"]
        assert fused.get_attributes()["arithmetic"] == arithmetic
    batch = np.random.default_rng(2).standard_normal((3, 20, 96), dtype=np.float32) / 100
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    answer, truth = (
        openvino.compile_model(network, "CPU", settings)(batch)[0].copy() for network in (model, _graph(times=2e4))
    )
    np.testing.assert_allclose(answer, truth, atol=1e-5 * np.abs(batch).max())


@needs_kernel
def test_bf16_falls_back_to_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = openvino_library()
    assert library is not None
    for support, outcome in ((2, "bf16"), (1, "f32"), (0, "no instructions")):
        made = SimpleNamespace(
            masked_attention_support=partial(int, support),
            gmmvit_instruction_set_name=lambda: b"avx2",
            gmmvit_why_no_instruction_set=lambda: b"no instructions",
        )
        made.gmmvit_instruction_set_name.restype = made.gmmvit_why_no_instruction_set.restype = None
        monkeypatch.setattr(ctypes, "CDLL", lambda path, made=made: made)
        assert kernels_from(library, "bf16")[1] == outcome


# ---- where it is not available ---------------------------------------------------------------------------------


@pytest.fixture
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """On a machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiling.openvino_library.cache_clear()
    yield
    compiling.openvino_library.cache_clear()


@pytest.mark.usefixtures("_anew")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, bundle: Bundle, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    library, why = openvino_library()
    assert library is None
    assert why == "no C++ compiler: no-such-compiler is not installed; install g++, or set CXX to another compiler"
    with open_runner("openvino", bundle) as runner:
        assert runner.settings["attention"] == "OpenVINO's"
        assert runner.run(fresh_inputs(bundle, 2)).shape[0] == 2


@pytest.mark.usefixtures("_anew")
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'x.cpp:1: error: no' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    library, why = openvino_library()
    assert library is None
    again = "type gmmvit doctor --empty-kernel-cache to compile again"
    assert why == f"the compiler {script} failed: x.cpp:1: error: no; {again}"
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.usefixtures("_anew")
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, no folder")
    library, why = openvino_library()
    assert library is None
    assert str(tmp_path / "cache") in why


def test_a_library_of_another_version(tmp_path: Path) -> None:
    other = tmp_path / "openvino_kernels.so"
    other.write_bytes(b"no library")
    kernels, why = kernels_from(other, "f32")
    assert kernels is None
    assert why.startswith("openvino_kernels.so cannot be loaded:")
