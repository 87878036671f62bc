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
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import run_card
import torch
from interleaved import ratio, time_rounds
from torch import nn

from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.models.attention import MaskedAttention, heads_of
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
        query, key, value = (heads_of(part, attention.heads) for part in attention.qkv(x).chunk(3, dim=-1))
        weights = torch.softmax(attention.scores.masked(torch.einsum("bhid,bhjd->bhij", query, key)), dim=-1)
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


def program(session: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda images: session.run(["logits"], {"tensor": images})[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this one")
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
        for batch in arguments.batch or BATCHES:
            programs = {name: program(session) for name, session in sessions.items()}
            times, logits, _ = time_rounds(programs, batch, arguments.rounds)
            worst = max(float(np.abs(logits["folded"] - logits[other]).max()) for other in ("unfolded", "einsum"))
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
