"""Is another layout of the projections faster in ONNX Runtime than the exported graph?

In the exported graph, transposes and splits around attention copy tensors (`where_time_goes.py` shows the time). If a
projection is computed as Qᵀ = Wᵀ xᵀ, a reshape splits the result into heads, and no copy remains
(`channels_first.py`). This script measures the total time of the paper's models in both layouts, with a mask and
without. Both layouts run as programs of our runner. The script stops if the logits of the layouts differ.

    python benchmarks/rejected/layouts.py [--rounds 15] [--family vit] [--check]
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.rejected.channels_first import channels_first
from benchmarks.shared.families import FAMILIES, graphs_of, pair
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import time_rounds
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.runtime.onnxruntime import program_from_onnx
from gmmvit_deploy.specs import input_shape

BATCHES = (1, 64)
_MOST_OFF = 1e-4


def of_family(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    image_shape = input_shape(pair(name)["trained"].spec)
    programs = {}
    results: dict[str, Any] = {}
    graphs = graphs_of(name, ("trained", "plain"), max_batch=max(BATCHES))
    for key, proto in {"gmm": graphs["trained"], "plain": graphs["plain"]}.items():
        changed = copy.deepcopy(proto)
        results[f"cuts, {key}"] = channels_first(changed)
        onnx.checker.check_model(changed)
        for form, graph in (("exported", proto), ("channels first", changed)):
            path = folder / f"{key} {form}.onnx"
            onnx.save(graph, path)
            programs[f"{key}, {form}"] = program_from_onnx(path).run
    for batch in BATCHES:
        timed = time_rounds(programs, batch, rounds, image_shape=image_shape)
        times, logits = timed.ms, timed.logits
        results[str(batch)] = {}
        for key in ("gmm", "plain"):
            off = float(np.abs(logits[f"{key}, channels first"] - logits[f"{key}, exported"]).max())
            if not off < _MOST_OFF:
                raise SystemExit(f"{name} {key}: the logits are {off:.1e} off, so its time is not valid")
            relative = ratio(times[f"{key}, channels first"], times[f"{key}, exported"])
            results[str(batch)][key] = relative
            print(f"{name} {key}, batch {batch}: {ratio_words(relative)}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be repeated")
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    arguments = parsed(parser, rounds=1, family=["vit"])
    with run_card.written(arguments.output, "layouts.py", rounds=arguments.rounds) as results:
        results["families"] = {}
        for name in arguments.family or FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                results["families"][name] = of_family(name, Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
