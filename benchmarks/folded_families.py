"""Does a folded mask cost anything, in any family?  Folded GMM models against their plain twins.

The five models of the paper as its released code names them (vit, swin, cait, pit, t2t; 32×32,
10 classes, K = 5 a head), in ONNX Runtime. A twin has the same weights and no mask; the ViT twin
has no class token, so that it has the same tokens. Each pair is interleaved round by round.

    python benchmarks/folded_families.py [--rounds 40] [--output benchmarks/results/folded_families.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import run_card
import torch
from interleaved import ratio, time_rounds

from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.models.build import Model, model_from_spec
from gmmvit_deploy.presets import preset_spec
from gmmvit_deploy.runtime.onnxruntime import session_from_onnx
from gmmvit_deploy.specs import MaskSpec, ViTSpec

FAMILIES = ("vit", "swin", "cait", "pit", "t2t")
BATCHES = (1, 64)
Program = Callable[[np.ndarray], np.ndarray]


def pair(family: str) -> dict[str, Model]:
    """A GMM model with random weights, and the same without its masks."""
    torch.manual_seed(0)
    spec = preset_spec(family, classes=10, image_size=32, mask=MaskSpec(kind="gmm", kernels=5))
    plain = replace(spec, mask=MaskSpec())
    if isinstance(plain, ViTSpec):
        plain = replace(plain, class_token=False)
    masked, twin = model_from_spec(spec).eval(), model_from_spec(plain).eval()
    twin.load_state_dict({name: t for name, t in masked.state_dict().items() if ".mask." not in name})
    return {"gmm": masked, "plain": twin}


def program(model: Model, folder: Path) -> Program:
    path = folder / "model.onnx"
    onnx.save(onnx_from_model(fold(model).model, preprocessing=None, max_batch=max(BATCHES)), path)
    session = session_from_onnx(path)
    return lambda images: session.run(["logits"], {"tensor": images})[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this one")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "folded_families.json")
    arguments = parser.parse_args()
    card = run_card.start("folded_families.py", rounds=arguments.rounds)
    results: dict[str, Any] = {"families": {}}
    for family in arguments.family or FAMILIES:
        models = pair(family)
        with tempfile.TemporaryDirectory() as folder:
            programs = {name: program(model, Path(folder)) for name, model in models.items()}
        results["families"][family] = {}
        for batch in arguments.batch or BATCHES:
            times, logits, _ = time_rounds(programs, batch, arguments.rounds)
            if not all(np.isfinite(values).all() for values in logits.values()):
                raise SystemExit(f"{family}: logits are not finite, so their times mean nothing")
            found = ratio(times["gmm"], times["plain"])
            medians = {name: float(np.median(values)) for name, values in times.items()}
            results["families"][family][str(batch)] = {"gmm_over_plain": found, "median_ms": medians}
            print(f"{family}, batch {batch}: {found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})")
    results["card"] = run_card.finish(card)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
