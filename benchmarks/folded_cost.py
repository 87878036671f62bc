"""What does the mask cost?  Folded GMM-ViT against its maskless twin, and against no folding.

Four graphs of the paper's ViT d9 (32×32, 64 tokens, 12 heads), in ONNX Runtime:

    plain     no mask, no class token: the same tokens, the same matrix products
    folded    Gaussian mixture mask, K = 5 a head, exported by this project
    unfolded  the trained module exported as it is: mask arithmetic in the graph
    einsum    likewise, with the attention products as Einsum, as the released code writes them

All run in one process, interleaved round by round in a random order, so that a drifting machine drifts for all. A ratio
is the median over rounds of time/time within a round, with a bootstrap interval. Outputs of the
three masked graphs are compared in the timed run.

    python benchmarks/folded_cost.py [--rounds 60] [--output benchmarks/results/folded_cost.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import run_card
import torch
from torch import nn

from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.models.attention import MaskedAttention
from gmmvit_deploy.models.vit import ViT
from gmmvit_deploy.presets import vit
from gmmvit_deploy.runtime.onnxruntime import session_from_onnx
from gmmvit_deploy.specs import MaskSpec

BATCHES = (1, 64)


class EinsumAttention(nn.Module):
    """The products of `MaskedAttention` written as Einsum; everything else is the original's."""

    def __init__(self, original: MaskedAttention) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = self.original
        query, key, value = (attention._heads_of(part) for part in attention.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * attention.scale
        weights = torch.softmax(attention.mask(scores), dim=-1)
        mixed = torch.einsum("bhij,bhjd->bhid", weights, value)
        return attention.out(mixed.transpose(1, 2).flatten(2))


def graphs() -> dict[str, onnx.ModelProto]:
    torch.manual_seed(0)
    spec = replace(vit(10, 32, MaskSpec(kind="gmm", kernels=5)), class_token=False)
    masked = ViT(spec).eval()
    plain = ViT(replace(spec, mask=MaskSpec())).eval()
    plain.load_state_dict({k: v for k, v in masked.state_dict().items() if ".mask." not in k})
    einsum = ViT(spec).eval()
    einsum.load_state_dict(masked.state_dict())
    for block in einsum.blocks:
        block.attention = EinsumAttention(block.attention)
    models = {"plain": fold(plain).model, "folded": fold(masked).model, "unfolded": masked, "einsum": einsum}
    return {name: onnx_from_model(model, preprocessing=None, max_batch=max(BATCHES)) for name, model in models.items()}


def time_rounds(sessions: dict[str, Any], batch: int, rounds: int) -> tuple[dict[str, np.ndarray], float]:
    """Milliseconds of every run by graph, and the largest difference among the masked graphs' logits."""
    generator = np.random.default_rng(batch)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    worst = 0.0
    repeats = max(1, 32 // batch)
    for round_number in range(rounds + 3):
        images = generator.standard_normal((batch, 3, 32, 32), dtype=np.float32)
        logits = {}
        for name in generator.permutation(list(sessions)):
            start = time.perf_counter()
            for _ in range(repeats):
                logits[name] = sessions[name].run(["logits"], {"tensor": images})[0]
            elapsed = (time.perf_counter() - start) / repeats
            if round_number >= 3:  # the first rounds fill caches and start threads
                times[name].append(elapsed * 1e3)
        masked = [logits[name] for name in ("folded", "unfolded", "einsum")]
        worst = max(worst, *(float(np.abs(masked[0] - other).max()) for other in masked[1:]))
    return {name: np.array(values) for name, values in times.items()}, worst


def ratio(above: np.ndarray, below: np.ndarray) -> dict[str, float]:
    """Median of the ratios within rounds, and its 95 % bootstrap interval."""
    ratios = above / below
    drawn = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "folded_cost.json")
    arguments = parser.parse_args()
    card = run_card.start("folded_cost.py", rounds=arguments.rounds)
    results: dict[str, Any] = {"batches": {}}
    with tempfile.TemporaryDirectory() as folder:
        sessions = {}
        results["operators"] = {}
        for name, proto in graphs().items():
            path = Path(folder) / f"{name}.onnx"
            onnx.save(proto, path)
            results["operators"][name] = dict(sorted(Counter(n.op_type for n in proto.graph.node).items()))
            sessions[name] = session_from_onnx(path)
        for batch in BATCHES:
            times, worst = time_rounds(sessions, batch, arguments.rounds)
            results["batches"][str(batch)] = {
                "median_ms": {name: float(np.median(values)) for name, values in times.items()},
                "folded_over_plain": ratio(times["folded"], times["plain"]),
                "unfolded_over_folded": ratio(times["unfolded"], times["folded"]),
                "einsum_over_folded": ratio(times["einsum"], times["folded"]),
                "largest_logit_difference": worst,
            }
    results["card"] = run_card.finish(card)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    for batch, found in results["batches"].items():
        print(f"batch {batch}: median ms { ({k: round(v, 2) for k, v in found['median_ms'].items()}) }")
        for name in ("folded_over_plain", "unfolded_over_folded", "einsum_over_folded"):
            r = found[name]
            print(f"  {name.replace('_', ' ')}: {r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})")
        print(f"  largest difference of logits: {found['largest_logit_difference']:.1e}")


if __name__ == "__main__":
    main()
