"""Do the limits of parity separate correct runners from wrong runners, in units of float32 noise?

For each golden model, distances from PyTorch's float64 logits on the golden and on random inputs:

    noise         the distance of PyTorch's float32 logits, the unit of the other distances
    runner        the distance of ONNX Runtime's float32 logits
    fp16, bf16    the distance of the graph's logits, with all roundings of the type emulated on the CPU. The unit is
                  the noise multiplied by the ratio of the types' unit roundoffs
    mistakes      the distance of each mistake that `parity.suspects` can make in the model, divided by the limit.
                  Parity detects a mistake if this ratio is above 1

    python benchmarks/parity_limits.py [--model vit_gmm] [--check] [--output RESULT]
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared import run_card
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.places import ROOT
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.exporting.graphs_of_precisions import prepared_graph
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.parity.inputs import golden_batch
from gmmvit_deploy.parity.measures import ErrorMeasure, Errors
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.suspects import suspects
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.tolerances import limit_from_noise, roundoff_ratio

GOLDEN = ROOT / "tests" / "golden"
RANDOM = 32


def measured(logits: np.ndarray, expected: np.ndarray) -> ErrorMeasure:
    measure = ErrorMeasure()
    measure.add(logits, expected)
    return measure


def over(errors: Errors, unit: Errors, factor: float = 1.0) -> dict[str, float]:
    return {"largest": errors.largest / unit.largest / factor, "rms": errors.rms / unit.rms / factor}


def rows_of(bundle: Bundle) -> dict[str, Any]:
    reference = Reference(bundle)
    inputs = np.concatenate([golden_batch(bundle)[0].inputs, fresh_inputs(bundle, RANDOM)])
    trained, exact = reference.logits(inputs)
    own = measured(trained, exact)
    noise, limit = own.errors(), limit_from_noise(own.noise())
    with OnnxRuntimeRunner(bundle) as runner:
        right = measured(runner.rows(inputs), exact).errors()
    row: dict[str, Any] = {
        "noise": {"largest": noise.largest, "rms": noise.rms, "scale": own.noise().scale},
        "runner": over(right, noise),
    }
    for precision in ("fp16", "bf16"):
        graph = prepared_graph(bundle, precision).model  # type: ignore[arg-type]
        factor = roundoff_ratio(precision)
        row[precision] = over(measured(emulated_logits(graph, inputs, name=precision), exact).errors(), noise, factor)
    mistakes = {}
    for name, logits in suspects(bundle, reference, inputs):
        errors = measured(logits, exact).errors()
        mistakes[name] = max(errors.largest / limit.largest, errors.rms / (limit.rms or np.inf))
    return {**row, "mistakes_over_limit": mistakes}


def main() -> None:
    parser = script_parser(__doc__, __file__)
    models = json.loads((GOLDEN / "manifest.json").read_text())
    parser.add_argument("--model", choices=list(models), action="append")
    arguments = parsed(parser, model=["vit_plain"])
    with (
        run_card.written(arguments.output, "parity_limits.py", timed=False, random=RANDOM) as results,
        tempfile.TemporaryDirectory() as folder,
    ):
        rows = results["models"] = {}
        for name in arguments.model or models:
            hints = LoadHints(**models[name].get("hints", {}))
            options = ExportOptions(input_kind="tensor", max_batch=8)
            bundle = bundle_from_checkpoint(GOLDEN / f"{name}.pth", Path(folder) / name, options, hints=hints)
            rows[name] = rows_of(bundle)
            print(name, {key: rows[name][key] for key in ("runner", "fp16", "bf16")}, flush=True)


if __name__ == "__main__":
    main()
