"""Can attention with a larger head dim replace a mask, and is this attention faster on a CPU?

    M = Σ_r u_r v_rᵀ, r = 1 … R      (Q Kᵀ) ∘ M = Q̃ K̃ᵀ,   Q̃ = [diag(u_1) Q, …],  K̃ = [diag(v_1) K, …]   head dim R · d

The equation is exact if M has rank R. Fused attention on CPUs supports no mask that multiplies the scores, but with
this equation it could compute a mask of low rank. The script answers two questions:

1. Which ranks do the initial masks of each family have? The rank is the number of singular values above 2⁻²⁴ times the
   largest singular value. The script also counts with 1e-3 instead of 2⁻²⁴; such a mask would change the logits.
2. Up to which R is ONNX Runtime's fused MultiHeadAttention with head dim R · d faster than the separate operators that
   it would replace (product, mask, softmax, product)? The time to compute Q̃ and K̃ is not included, which favours
   fused attention.

    python benchmarks/rejected/low_rank.py [--rounds 120] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.shared.families import FAMILIES, pair
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import turns
from gmmvit_deploy.bench.statistics import Ratio, ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.runtime.onnxruntime import session_from_bytes

BATCH, HEADS, TOKENS, HEAD_DIM = 8, 12, 64, 16  # a chunk of the paper's ViT d9
RANKS = (1, 2, 4, 8)
EXACT, COARSE = 2.0**-24, 1e-3


def ranks_of(family: str) -> dict[str, Any]:
    """Return the ranks of a family's masks.

    exact, coarse: the minimum, median and maximum rank of the heads' masks, with each threshold.
    tokens: the minimum and maximum number of tokens of the masks.
    """
    ranks: dict[str, list[int]] = {"exact": [], "coarse": []}
    tokens = []
    for mask in fold(pair(family)["trained"]).masks:
        matrices = mask.constant.double().numpy()
        for matrix in matrices.reshape(-1, *matrices.shape[-2:]):
            values = np.linalg.svd(matrix, compute_uv=False)
            ranks["exact"].append(int((values > EXACT * values[0]).sum()))
            ranks["coarse"].append(int((values > COARSE * values[0]).sum()))
            tokens.append(matrix.shape[0])
    return {
        **{name: [int(min(r)), int(np.median(r)), int(max(r))] for name, r in ranks.items()},
        "tokens": [min(tokens), max(tokens)],
    }


def masked() -> onnxruntime.InferenceSession:
    """Return a session of the separate operators product, mask, softmax, product, on heads (B, H, N, d)."""
    value = helper.make_tensor_value_info
    shape = [BATCH, HEADS, TOKENS, HEAD_DIM]
    mask = np.random.default_rng(0).uniform(0.1, 1, (HEADS, TOKENS, TOKENS)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Mul", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]
    inputs = [value(name, TensorProto.FLOAT, shape) for name in "qkv"]
    outputs = [value("y", TensorProto.FLOAT, shape)]
    return _session(helper.make_graph(nodes, "masked", inputs, outputs, [numpy_helper.from_array(mask, "mask")]))


def fused(rank: int) -> onnxruntime.InferenceSession:
    """Return a session of fused attention with Q and K of head dim R · d, (B, N, H·R·d)."""
    value = helper.make_tensor_value_info
    wide, plain = [BATCH, TOKENS, HEADS * rank * HEAD_DIM], [BATCH, TOKENS, HEADS * HEAD_DIM]
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=HEADS, scale=1.0
    )
    inputs = [value(name, TensorProto.FLOAT, shape) for name, shape in (("q", wide), ("k", wide), ("v", plain))]
    return _session(helper.make_graph([node], "fused", inputs, [value("y", TensorProto.FLOAT, plain)]))


def _session(graph: Any) -> onnxruntime.InferenceSession:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return session_from_bytes(model.SerializeToString(), graph.name)


def timed(rounds: int) -> dict[str, Ratio]:
    """Return rank → time of fused attention / time of the separate operators."""
    generator = np.random.default_rng(1)
    sessions = {"masked": masked(), **{str(rank): fused(rank) for rank in RANKS}}
    feeds = {
        name: {
            tensor.name: generator.standard_normal(tensor.shape, dtype=np.float32) * 0.1
            for tensor in session.get_inputs()
        }
        for name, session in sessions.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for name, counts in turns(list(sessions), rounds, generator, warm_ups=3):
        time.sleep(0.01)
        sessions[name].run(None, feeds[name])
        start = time.perf_counter()
        for _ in range(20):
            sessions[name].run(None, feeds[name])
        if counts:
            times[name].append(time.perf_counter() - start)
    return {str(rank): ratio(times[str(rank)], times["masked"]) for rank in RANKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument(
        "--family", choices=FAMILIES, action="append", help="ranks of this family only; may be repeated"
    )
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1, family=["vit"])
    with run_card.written(
        arguments.output, "low_rank.py", rounds=arguments.rounds, batch=BATCH, heads=HEADS, tokens=TOKENS, d=HEAD_DIM
    ) as results:
        results["ranks"] = {family: ranks_of(family) for family in arguments.family or FAMILIES}
        for family, row in results["ranks"].items():
            ranks = f"minimum, median, maximum rank: {row['exact']}; with 1e-3: {row['coarse']}"
            print(f"{family}: tokens {row['tokens']}, {ranks}")
        results["fused_over_masked"] = timed(arguments.rounds)
        for rank, relative in results["fused_over_masked"].items():
            print(f"rank {rank}: fused attention / separate operators {ratio_words(relative, 2)}")


if __name__ == "__main__":
    main()
