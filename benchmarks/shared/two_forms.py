"""Compare forms of a system: the graph that `gmmvit export` writes, and other graphs that compute the same logits.

    form      trained model → folded model, whose graph differs from the exported graph
    ratio     time of the form / time of the exported graph, in the same round

`rejected/rotation_as_rows.py` and `rejected/shifted_patches_as_convolution.py` use this module.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.shared.cpu_programs import RUNNERS, cpu_program
from benchmarks.shared.options import parsed
from benchmarks.shared.places import result_of
from benchmarks.shared.systems import SYSTEMS, system_model
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import Program, time_rounds
from gmmvit_deploy.bench.statistics import ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.specs import input_shape
from gmmvit_deploy.tolerances import limit_from_noise

__all__ = ["BATCHES", "EXPORTED", "Form", "float64_difference", "main", "require_right_logits"]

Form = Callable[[Model], Model]
"""Trained model → folded model in this form.  The trained model stays unchanged."""

BATCHES = (1, 64)
EXPORTED = "exported"
"""The name of the form that `gmmvit export` writes."""
MOST_DIFFERENT = 1e-9
"""Maximum difference between the float64 logits of two forms, divided by the largest logit."""
_ROUNDS = {1: 2, 64: 1}  # batch → factor for the rounds; single images take less time and vary more
_COPIES = 2


def _folded(model: Model) -> Model:
    return fold(model).model


def float64_difference(name: str, form: Model, exported: Model, images: torch.Tensor) -> float:
    """Return the largest difference between the float64 logits of two folded models / the largest logit.

    name: the name of the form, for the message.  images: (B, c, height, width).
    Errors: SystemExit when the difference exceeds `MOST_DIFFERENT` or is NaN.
    """
    with torch.inference_mode():
        logits, expected = (copy.deepcopy(model).double()(images.double()).numpy() for model in (form, exported))
    difference = distance(logits, expected) / float(np.abs(expected).max())
    if not difference <= MOST_DIFFERENT:
        raise SystemExit(f"{name}: the float64 logits differ by {difference:.2g}, expected at most {MOST_DIFFERENT:g}")
    return difference


def require_right_logits(
    model: Model, programs: Mapping[str, Sequence[Program]], precisions: Mapping[str, Any], images: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return name of a program → the distance of its logits from PyTorch's float64 logits, and the limit of parity.

    programs: name → copies of the program. Every copy runs.  precisions: name → precision of the program.
    Errors: SystemExit when a distance exceeds the limit or is NaN.
    """
    tensor, measure = torch.from_numpy(images), ErrorMeasure()
    with torch.inference_mode():
        truth = copy.deepcopy(model).double()(tensor.double()).numpy()
        measure.add(model(tensor).numpy(), truth)
    distances = {}
    for name, copies in programs.items():
        limit = limit_from_noise(measure.noise(), precisions[name]).largest
        # np.max, unlike max, is NaN if any distance is NaN: logits that are not finite.
        off = float(np.max([distance(program(images), truth) for program in copies]))
        if not off <= limit:
            raise SystemExit(f"{name}: the logits differ by {off:.2g}, expected at most {limit:.2g}")
        distances[name] = {"off": off, "limit": limit}
    return distances


class _System:
    """The programs of a system: each form in each CPU runner with our kernels."""

    def __init__(self, name: str, forms: Mapping[str, Form], folder: Path) -> None:
        self.model = system_model(SYSTEMS[name].timed_spec)
        self.image_shape = input_shape(self.model.spec)
        self.programs: dict[str, list[Program]] = {}
        self.precisions: dict[str, str] = {}
        images = torch.randn(2, *self.image_shape, generator=torch.Generator().manual_seed(0))
        models = {form: make(self.model) for form, make in {EXPORTED: _folded, **forms}.items()}
        self.differences = {
            form: float64_difference(f"{name}, {form}", models[form], models[EXPORTED], images) for form in forms
        }
        for form, model in models.items():
            path = folder / f"{form}.onnx"
            onnx.save(onnx_from_model(model, preprocessing=None, max_batch=max(BATCHES)), path)
            for runner, precision in RUNNERS.items():
                program = f"{runner}, {form}"
                self.programs[program] = [cpu_program(path, runner, precision) for _ in range(_COPIES)]
                self.precisions[program] = precision

    def check(self, images: np.ndarray, logits: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """Check every copy of every program as `require_right_logits` does.

        logits: name of a program → earlier logits for the same images, which are checked as well; may be empty.
        """
        programs = {
            name: [*copies, *([lambda _, name=name: logits[name]] if name in logits else [])]
            for name, copies in self.programs.items()
        }
        return require_right_logits(self.model, programs, self.precisions, images)

    def measured(self, batch: int, rounds: int, forms: Sequence[str]) -> dict[str, Any]:
        """Return runner → the row of the results.

        exported_ms: the median time of the exported graph.
        off, limit: the largest distance of a logit from PyTorch's float64 logit, and the allowed distance.
        forms: form → the same distances, and over_exported: the time of the form / the time of the exported graph.
        """
        timed = time_rounds(self.programs, batch, rounds * _ROUNDS[batch], image_shape=self.image_shape)
        checks = self.check(timed.images, timed.logits)
        rows: dict[str, Any] = {}
        for runner in RUNNERS:
            exported = timed.ms[f"{runner}, {EXPORTED}"]
            rows[runner] = {"exported_ms": float(np.median(exported)), **checks[f"{runner}, {EXPORTED}"], "forms": {}}
            for form in forms:
                program = f"{runner}, {form}"
                rows[runner]["forms"][form] = {"over_exported": ratio(timed.ms[program], exported), **checks[program]}
        return rows


def main(script: str, description: str, *, forms: Mapping[str, Form], systems: Sequence[str]) -> None:
    """Run the command line of a script.

    script: the path of the script.  description: the description in the help text.
    forms: name → form, without the exported form.  systems: names of `SYSTEMS`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds of a batch of 64; a single image gets twice as many"
    )
    parser.add_argument("--system", choices=systems, action="append", help="only this system; may be repeated")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this batch; may be repeated")
    parser.add_argument("--output", type=Path, default=result_of(script))
    arguments = parsed(
        parser, check="check the logits of every program, and time nothing", system=[systems[0]], batch=[1]
    )
    batches = arguments.batch or BATCHES
    with ExitStack() as stack:
        # Exports and compilations come before the run card, which describes the machine before the measurements.
        loaded = {
            name: _System(name, forms, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            for name in arguments.system or systems
        }
        if arguments.check:
            for name, system in loaded.items():
                _print_checks(name, system, batches)
            return
        with run_card.written(arguments.output, Path(script).name, rounds=arguments.rounds) as results:
            results["systems"] = {}
            for name, system in loaded.items():
                row: dict[str, Any] = {"size": SYSTEMS[name].size, "float64_difference": system.differences}
                results["systems"][name] = row
                for batch in batches:
                    row[str(batch)] = system.measured(batch, arguments.rounds, tuple(forms))
                    _print_rows(name, batch, row[str(batch)])


def _print_checks(name: str, system: _System, batches: Sequence[int]) -> None:
    for form, difference in system.differences.items():
        print(f"{name}, {form}: {difference:.2g} of the largest logit from the exported form in float64", flush=True)
    for batch in batches:
        images = np.random.default_rng(batch).standard_normal((batch, *system.image_shape), dtype=np.float32)
        for program, row in system.check(images, {}).items():
            off = f"{row['off']:.2g} from PyTorch's float64 logits, limit {row['limit']:.2g}"
            print(f"{name}, batch {batch}, {program}: {off}", flush=True)


def _print_rows(name: str, batch: int, rows: dict[str, Any]) -> None:
    for runner, row in rows.items():
        for form, values in row["forms"].items():
            words = ratio_words(values["over_exported"])
            print(f"{name}, batch {batch}, {runner}: {form} / exported {words}, exported {row['exported_ms']:.2f} ms")
