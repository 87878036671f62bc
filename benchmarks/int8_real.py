"""What does int8 cost in answers and gain in time on a CPU, compared with other projects' int8?

The networks have trained weights: a network with random weights does not show what int8 costs. A network is a
checkpoint with images beside it, or in a subfolder ``data``:

    train.npz or calibration.npz     calibrates; every tool gets the same images
    val.npz or judged.npz            the judged set
    shifted.npz                      the shifted set: the judged images, with other blur, contrast and noise; made here
                                     from photographs (224 pixels) if it is missing

each with ``images`` (N, height, width, 3), uint8, and ``labels`` (N,). `trained_networks.py` writes the paper's
networks in this form. ``--aside`` names a folder with photographs that no other set has: crops of these make a third
set, without labels.

The programs are the straight export in float32, in OpenVINO (also with its bf16), ONNX Runtime and AOTInductor; the
straight export quantised by other projects (`shared/int8_peers.py`), in each runtime that runs it; and our export in
float32, bf16 and int8: static, dynamic (without calibration), and mixed (projections moved to more exact forms until
98 % of the decisions are kept). Our int8 runs with our kernels and without.

    kept         the share of images that keep the class of the float32 straight export, with its interval
    db           variance of the centred float32 logits over the mean square of the difference
    cosine       the least cosine of an image's logits with the float32 logits, and the share of images below 0.98
    top1         the share of right classes, and its paired difference from float32's with an interval
    batches      size of a batch → ``kept`` at this size, as a program for one image may compute otherwise than that of
                 a batch; the other fields are those of the size that keeps fewest. An image that a set repeats counts
                 once. A result without this field was judged in batches of 16
    time         of each program, divided by the float32 straight export's in OpenVINO, in the same rounds
    needed       measure of how undecided an image is → the share of the images to compute again in float32, the most
                 undecided in our static int8 first, so that 99.8 % keep their class: the margin of logits, that of
                 probabilities, and the margin of logits over their standard deviation
    deferred     of a cascade (`CASCADES`): the share of the images that float32 computes again
    on_images    times on the judged images, as that of a cascade depends on them: mean and 99th percentile of a batch

The parts write separate results: ``--part prepare`` quantises, into ``--work`` (a network of 22 million weights takes
about half an hour on two cores); ``--part judge`` computes the logits; ``--part speed`` needs a quiet machine. What
``--work`` holds is not made again. On a processor with AMX, ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` judges the programs
of a processor without; the card states it. ``--program`` (a field of the result) leaves the other programs out.

    python benchmarks/int8_real.py --network CHECKPOINT --work FOLDER [--aside PHOTOGRAPHS] [--peers PYTHON]
        [--torchao PYTHON] [--part prepare|judge|speed] [--program NAME] [--rounds 10] [--check]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch._inductor.package import load_package

from benchmarks.shared import run_card
from benchmarks.shared.cpu_programs import straight_openvino
from benchmarks.shared.families import as_released
from benchmarks.shared.int8_peers import RECIPES
from benchmarks.shared.interleaved import Program, time_rounds
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.photographs import crops_of, shifted
from benchmarks.shared.places import BENCHMARKS, ROOT, why_failed
from benchmarks.shared.straight_export import straight_graph, straight_program
from benchmarks.shared.tables_int8 import int8_plot
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.cascades import KEEP_DECISIONS, read_cascade, write_cascade
from gmmvit_deploy.bundle.variants import forms_in, open_variant, record_of
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.reading import IMAGES_METADATA_KEY, MODEL_METADATA_KEY
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.cascades import cascade_from_images
from gmmvit_deploy.exporting.variants import variants_from_bundle
from gmmvit_deploy.graphs.merged_tokens import why_not_merged
from gmmvit_deploy.images.data.images import evenly_spaced
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.cascade import decision_margins
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.intervals import score_interval, share_interval
from gmmvit_deploy.measure.statistics import ENOUGH, nearest_rank, ratio
from gmmvit_deploy.measure.turns import seconds_of, settle
from gmmvit_deploy.models.families import spec_to_json
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_onnx
from gmmvit_deploy.runtimes.runners.cascade import CascadeRunner
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.tolerances import signal_to_noise_db

PARTS = ("prepare", "judge", "speed")
BATCHES = {1: 2, 16: 1}
"""Batch → factor for the rounds: single images take less time and vary more."""
CALIBRATION_IMAGES = 512
REFERENCE = "straight openvino"
SETS = ("judged", "shifted", "aside")
_FILES = {"calibration": ("calibration", "train"), "judged": ("judged", "val"), "shifted": ("shifted",)}
_COPIES = 3
_CROPS = 24
_MIN_COSINE = 0.98

OURS = {"static": ["--calibration"], "dynamic": [], "mixed": ["--keep-decisions", "0.98", "--calibration"]}
"""Our kind of int8 → options of ``gmmvit convert``; the calibration images follow ``--calibration``."""

STATIC = RunnerName.parse("openvino+kernels:int8-static")
MERGED = replace(STATIC, form="merged")
CASCADES = {
    "cascade 99.8 %": (STATIC, 0.998),
    "cascade 99.98 %": (STATIC, 0.9998),
    "cascade merged 99.8 %": (MERGED, 0.998),
    "cascade merged 99.98 %": (MERGED, 0.9998),
}
"""Cascade with float32 in OpenVINO with our kernels → its first program, the share of the decisions that it targets."""
_ON_IMAGES = (
    REFERENCE,
    "straight onnxruntime",
    "aotinductor torch",
    "straight openvino bf16",
    "nncf_default openvino",
    "nncf_accuracy openvino",
    "ort_static onnxruntime",
    "ort_dynamic onnxruntime",
    "pt2e_static torch",
    "pt2e_dynamic torch",
    "ours fp32 openvino+kernels",
    "ours bf16 openvino+kernels",
    "ours static openvino+kernels",
    *CASCADES,
)
_GROUPS = 12
"""The rounds of ``on_images``: each is a part of the judged images."""
SMALL_SETS = {"calibration": 160, "judged": 16, "shifted": 16}
"""The images of a set with ``--check``: a quarter of the first sets no range, and chooses thresholds."""
_TIMED_BATCHES = {1: 672, 16: 48}


class Network:
    """A checkpoint with its images, and what `prepare` made of it.  missing: int8 → why it could not be made."""

    def __init__(self, checkpoint: Path, work: Path, chosen: Sequence[str]) -> None:
        """chosen: names of programs; empty means all."""
        self.checkpoint, self.name, self.chosen = checkpoint, checkpoint.stem, {REFERENCE, *chosen} if chosen else None
        self.folder = work / self.name
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def missing(self) -> dict[str, str]:
        return {path.stem: path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("*.txt"))}

    @property
    def tools(self) -> dict[str, dict[str, str]]:
        """Recipe of another project → name of its tool → version."""
        return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("*.json"))}

    @property
    def minutes(self) -> dict[str, float]:
        """Name of what a command made → the minutes that it took."""
        return {path.stem: round(float(path.read_text()) / 60, 1) for path in sorted(self.folder.glob("*.seconds"))}

    def wanted(self, made: str) -> bool:
        """Return whether a chosen program runs an int8 graph."""
        return self.chosen is None or any(made in name.split(" ")[:2] for name in self.chosen)

    def data(self, kind: str) -> Path | None:
        """Return the file of a kind of images, given or made; None if there is none."""
        given = (place / f"{name}.npz" for place in self._places() for name in _FILES.get(kind, (kind,)))
        return next((path for path in (*given, self.folder / f"{kind}.npz") if path.is_file()), None)

    def required(self, kind: str) -> Path:
        path = self.data(kind)
        if path is None:
            names = " or ".join(f"{name}.npz" for name in _FILES[kind])
            raise InputError(f"{self.checkpoint}: expected {names} beside it, or in data/ beside it, got neither")
        return path

    def images(self, kind: str, most: int | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return (distinct images (N, height, width, 3), uint8, labels (N,) or None), at most ``most``."""
        with np.load(self.required(kind)) as arrays:
            images, labels = arrays["images"], arrays.get("labels")
        chosen = evenly_spaced(len(images), most or len(images))
        first = {
            digest: index for index, digest in reversed(list(zip(chosen, image_hashes(images[chosen]), strict=True)))
        }
        chosen = np.sort(list(first.values()))
        return images[chosen], labels if labels is None else labels[chosen]

    def bundle(self, kind: str = "bundle") -> Bundle:
        return open_bundle(self.folder / kind)

    def prepare(self, peers: dict[str, str], aside: Path | None) -> None:
        """Export and quantise.  peers: recipe → the Python that has its tool.  aside: a folder of photographs."""
        if not (self.folder / "bundle").exists():
            options = ExportOptions(input_kind="tensor", max_batch=64)
            bundle_from_checkpoint(self.checkpoint, self.folder / "bundle", options)
        bundle = self.bundle()
        side = bundle.input_shape[1]
        if self.data("shifted") is None:
            with np.load(self.required("judged")) as arrays:
                np.savez(self.folder / "shifted.npz", images=shifted(arrays["images"]), labels=arrays["labels"])
        if aside is not None and self.data("aside") is None:
            np.savez(self.folder / "aside.npz", images=crops_of(aside, side, _CROPS))
        straight, calibration = self.folder / "straight.onnx", self.folder / "calibration.npy"
        self._export(straight)
        if not calibration.exists():
            images, _ = self.images("calibration", CALIBRATION_IMAGES)
            # A tool may take only the first images, which must not be of the first classes only.
            np.save(calibration, bundle.inputs_from_pixels(np.random.default_rng(0).permutation(images)))
        for recipe in filter(self.wanted, RECIPES):
            script = BENCHMARKS / "shared" / "int8_peers.py"
            output = self._quantised(recipe)
            self._make(recipe, output, [peers[recipe], script, recipe, straight, calibration, output])
        for kind, options in ((kind, options) for kind, options in OURS.items() if self.wanted(kind)):
            self._convert(kind, [*options, self.required("calibration")] if options else [])
        if "static" in self.missing:
            return
        static, source = self.bundle("static"), str(self.required("calibration"))
        if "merged" not in forms_in(static, "int8") and not why_not_merged(ir.load(static.onnx_path).graph):
            like = record_of(static, "int8", "static")
            variants_from_bundle(static, ("int8",), source, CALIBRATION_IMAGES, like=like, merged=True)
        known: dict[str, np.ndarray] = {}
        for first in (STATIC, MERGED):
            if first.form in forms_in(static, "int8"):
                with open_runner(first, static) as fast, open_runner("openvino+kernels", static) as exact:
                    record = cascade_from_images(
                        static, fast, exact, source, keep_decisions=KEEP_DECISIONS, known=known
                    )
                write_cascade(static, first, record)

    def _export(self, straight: Path) -> None:
        """Write the straight graph, and beside it the program that PyTorch's compilers read."""
        bundle, traced = self.bundle(), straight.with_suffix(".pt2")
        model = as_released(model_from_bundle(bundle.manifest, bundle.weights_path))
        if not straight.exists():
            ir.save(straight_graph(model, bundle.input_shape, bundle.manifest.max_batch), straight)
        if not traced.exists():
            torch.export.save(straight_program(model, bundle.input_shape, bundle.manifest.max_batch), traced)

    def cascade(self, name: str) -> CascadeRunner:
        static, (first, keep_decisions) = self.bundle("static"), CASCADES[name]
        record = read_cascade(static, first, open_variant(static, "int8", first.form).sha256)
        write_cascade(static, first, record.with_target(keep_decisions))
        return CascadeRunner(*(open_runner(stage, static) for stage in replace(first, cascade=True).stages))

    def _convert(self, kind: str, options: list[Any]) -> None:
        output = self.folder / kind
        if any(output.glob("graphs/int8-*.json")):  # where no projection has to move, a gate gives the static form
            return
        shutil.copytree(self.folder / "bundle", output, dirs_exist_ok=True)
        main = "from gmmvit_cli.main import main; main()"
        command = [sys.executable, "-c", main, "convert", output, "--precision", "int8", *options]
        self._make(kind, output / "graphs" / f"int8-{kind}.json", command)
        if kind in self.missing:
            shutil.rmtree(output)

    def _make(self, name: str, output: Path, command: list[Any]) -> None:
        """Run a command that makes ``output``, unless it exists.  An error is kept as the reason why it is missing."""
        reason = self.folder / f"{name}.txt"
        reason.unlink(missing_ok=True)
        if output.exists():
            return
        print(f"{self.name}: {name}", flush=True)
        started = time.monotonic()
        why = why_failed(command)
        if not why:
            (self.folder / f"{name}.seconds").write_text(f"{time.monotonic() - started:.1f}", encoding="utf-8")
        else:
            output.unlink(missing_ok=True)  # a part of a file would count as made
            reason.write_text(why, encoding="utf-8")
            print(f"{self.name}: {name}: not made: {why}", flush=True)

    def programs(self) -> tuple[dict[str, Callable[[], Program]], dict[str, str]]:
        """Return (name → function that loads the program, name of a missing program → the reason)."""
        loads: dict[str, Callable[[], Program]] = {
            REFERENCE: partial(straight_openvino, self.folder / "straight.onnx", "fp32"),
            "straight openvino bf16": partial(straight_openvino, self.folder / "straight.onnx", "bf16"),
            "straight onnxruntime": partial(_in_onnxruntime, self.folder / "straight.onnx"),
            "ours fp32 openvino+kernels": partial(_ours, self.bundle(), "openvino+kernels", "fp32"),
            "ours bf16 openvino+kernels": partial(_ours, self.bundle(), "openvino+kernels", "bf16"),
        }
        for recipe in RECIPES:
            path = self._quantised(recipe)
            if path.suffix == ".pt2":
                loads[f"{recipe} torch"] = partial(_in_torch, path)
                continue
            loads[f"{recipe} openvino"] = partial(straight_openvino, path, "fp32")
            if path.suffix == ".onnx":
                loads[f"{recipe} onnxruntime"] = partial(_in_onnxruntime, path)
        for kind in OURS:
            for runner in ("openvino", "openvino+kernels"):
                loads[f"ours {kind} {runner}"] = partial(_of_kind, self, kind, runner)
        for name in CASCADES:
            loads[name] = partial(_cascade, self, name)
        loads = {name: load for name, load in loads.items() if self.chosen is None or name in self.chosen}
        missing = {
            name: reason for name in loads for made, reason in self.missing.items() if made in name.split(" ")[:2]
        }
        shape = self.bundle().input_shape
        for name in [name for name in loads if name not in missing]:
            try:
                program = loads[name]()
                for batch in BATCHES:
                    program(np.zeros((batch, *shape), np.float32))
            except Exception as exc:  # each runtime has its own errors
                missing[name] = str(exc).strip().splitlines()[-1]
        return {name: load for name, load in loads.items() if name not in missing}, missing

    def _quantised(self, recipe: str) -> Path:
        return self.folder / f"{recipe}{RECIPES[recipe].suffix}"

    def _places(self) -> tuple[Path, Path]:
        return self.checkpoint.parent, self.checkpoint.parent / "data"


def _in_onnxruntime(path: Path) -> Program:
    session = session_from_onnx(path)
    return lambda images: session.run(["logits"], {"tensor": images})[0]


def _in_torch(path: Path) -> Program:
    models = {batch: load_package(path, str(batch)) for batch in BATCHES}

    def run(images: np.ndarray) -> np.ndarray:
        logits: np.ndarray = models[len(images)](torch.from_numpy(images)).numpy()
        return logits

    return run


def _ours(bundle: Bundle, runner: str, precision: Any) -> Program:
    return open_runner(runner, bundle, precision=precision).run


def _of_kind(network: Network, kind: str, runner: str) -> Program:
    return _ours(network.bundle(kind), runner, "int8")


def _cascade(network: Network, name: str) -> Program:
    return network.cascade(name).run


def deferred_of(network: Network, name: str, images: np.ndarray, batch: int) -> float:
    """Return the share of uint8 images that a cascade computes again."""
    with network.cascade(name) as runner:
        return float(runner.rows_all(runner.bundle.inputs_from_pixels(images), batch=batch)[DEFERRED].mean())


def logits_of(program: Program, images: np.ndarray, bundle: Bundle, batch: int) -> np.ndarray:
    """Return the logits (N, C) of uint8 images; the last batch is filled, so that a single size is compiled."""
    logits = []
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        filled = np.resize(part, (batch, *part.shape[1:]))
        logits.append(program(bundle.inputs_from_pixels(filled))[: len(part)])
    return np.concatenate(logits)


def compared(logits: np.ndarray, reference: np.ndarray, labels: np.ndarray | None) -> dict[str, Any]:
    """Compare the logits of a program with float32's; the fields are defined at the head of this module."""
    answers, expected, count = logits.argmax(1), reference.argmax(1), len(logits)
    kept = int((answers == expected).sum())
    norms = np.linalg.norm(logits, axis=1) * np.linalg.norm(reference, axis=1)
    cosines = (logits * reference).sum(1) / norms
    row: dict[str, Any] = {
        "images": count,
        "kept": kept / count,
        "kept_interval": share_interval(kept, count),
        "db": signal_to_noise_db(logits, reference),
        "least_cosine": float(cosines.min()),
        "below_cosine": float((cosines < _MIN_COSINE).mean()),
    }
    if labels is not None:
        right, before = answers == labels, expected == labels
        lost, gained = int((before & ~right).sum()), int((right & ~before).sum())
        row["top1"] = float(right.mean())
        row["top1_difference"] = (gained - lost) / count
        row["top1_interval"] = score_interval(count, lost, gained)
    return row


def needed(logits: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Return measure → the share of images to compute again, as the head of this module says."""
    exact = np.exp(logits - logits.max(1, keepdims=True))
    margins = decision_margins(logits)
    measures = {
        "logits": margins,
        "probabilities": decision_margins(exact / exact.sum(1, keepdims=True)),
        "logits over spread": margins / logits.std(1),
    }
    changed, count = logits.argmax(1) != reference.argmax(1), len(logits)
    shares = {}
    for name, values in measures.items():
        changes = np.cumsum(changed[np.argsort(-values)])  # of the least undecided images
        shares[name] = 1 - int((changes <= (1 - KEEP_DECISIONS) * count).sum()) / count
    return shares


def judged(network: Network, most: int | None) -> dict[str, Any]:
    """Return the comparisons of each program with float32, on at most ``most`` images of each set."""
    loads, missing = network.programs()
    sets = {kind: network.images(kind, most) for kind in SETS if network.data(kind)}
    bundle = network.bundle()
    answers: dict[str, dict[str, np.ndarray]] = {}  # in the batches that keep fewest
    rows: dict[str, Any] = {}
    for name, load in loads.items():
        program = load()
        answers[name], rows[name] = {}, {}
        for kind, (images, labels) in sets.items():
            at = {batch: logits_of(program, images, bundle, batch) for batch in BATCHES}
            reference = answers[REFERENCE].get(kind, at[max(BATCHES)])
            each = {batch: compared(logits, reference, labels) for batch, logits in at.items()}
            worst = min(each, key=lambda batch: each[batch]["kept"])
            answers[name][kind] = at[worst]
            rows[name][kind] = {**each[worst], "batches": {batch: row["kept"] for batch, row in each.items()}}
            if name == "ours static openvino+kernels":
                rows[name][kind]["needed"] = needed(answers[name][kind], reference)
            if name in CASCADES:
                rows[name][kind]["deferred"] = deferred_of(network, name, images, max(BATCHES))
        print(
            name, {kind: (round(row["kept"], 4), round(row["db"], 1)) for kind, row in rows[name].items()}, flush=True
        )
        plain = name.removesuffix("+kernels")
        if plain != name and plain in answers:
            for kind, row in rows[name].items():
                pair = answers[name][kind].argmax(1), answers[plain][kind].argmax(1)
                row["changed_by_kernels"] = float((pair[0] != pair[1]).mean())
    return {"programs": rows, "missing": missing, "tools": network.tools, "minutes": network.minutes}


def timed(network: Network, rounds: int) -> dict[str, Any]:
    """Return batch → program → its time, and the ratio of its time to that of the float32 straight export."""
    loads, _ = network.programs()
    programs = {name: [load() for _ in range(_COPIES)] for name, load in loads.items() if name not in CASCADES}
    shape = network.bundle().input_shape
    batches: dict[str, Any] = {}
    for batch, factor in BATCHES.items():
        ms = time_rounds(programs, batch, rounds * factor, image_shape=shape).ms
        batches[str(batch)] = {
            name: {"ms": float(np.median(times)), "time": ratio(times, ms[REFERENCE])} for name, times in ms.items()
        }
        print(batch, {name: round(row["time"].value, 2) for name, row in batches[str(batch)].items()}, flush=True)
    return {"batches": batches, "on_images": timed_on_images(network)}


def timed_on_images(network: Network) -> dict[str, Any]:
    """Return batch → program → its times on judged images, and the ratio of its time to the straight export's."""
    loads, _ = network.programs()
    programs = {name: loads[name]() for name in _ON_IMAGES if name in loads}
    bundle, (images, _labels) = network.bundle(), network.images("judged")
    results: dict[str, Any] = {}
    for batch, count in _TIMED_BATCHES.items():
        chosen = bundle.inputs_from_pixels(images[evenly_spaced(len(images), min(batch * count, len(images)))])
        batches = [chosen[start : start + batch] for start in range(0, len(chosen) - batch + 1, batch)]
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        rounds: dict[str, list[float]] = {name: [] for name in programs}
        for program in programs.values():
            for each in batches:  # a cascade compiles its graph for each number of images that it computes again
                program(each)
        for number, part in enumerate(np.array_split(range(len(batches)), min(_GROUPS, len(batches)))):
            for name, program in list(programs.items())[:: 1 if number % 2 else -1]:
                settle(partial(program, batches[part[0]]))
                of_part = [seconds_of(partial(program, batches[index])) for index in part]
                seconds[name] += of_part
                rounds[name].append(sum(of_part))
        results[str(batch)] = {
            name: {
                "mean_ms": 1e3 * float(np.mean(times)),
                "p99_ms": 1e3 * nearest_rank(times, 0.99) if len(times) >= ENOUGH[0.99] else None,
                "time": ratio(rounds[name], rounds[REFERENCE]),
            }
            for name, times in seconds.items()
        }
        print(batch, {name: round(row["time"].value, 2) for name, row in results[str(batch)].items()}, flush=True)
    return results


def small_network(folder: Path) -> Path:
    """Write a golden checkpoint that states its preprocessing, with random images, for ``--check``."""
    random = np.random.default_rng(0)
    model = load_checkpoint(ROOT / "tests" / "golden" / "vit_gmm.pth").model
    image = ImageSpec(height=32, width=32, channels=3, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    content = {
        "model_state_dict": model.state_dict(),
        MODEL_METADATA_KEY: json.dumps(spec_to_json(model.spec)),
        IMAGES_METADATA_KEY: json.dumps({"image": image.to_json(), "labels": [*"0123456789"]}),
    }
    checkpoint = folder / "small.pth"
    torch.save(content, checkpoint)
    for name in SMALL_SETS:
        images = random.integers(0, 256, (SMALL_SETS[name], 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=np.arange(len(images)) % 10)
    return checkpoint


def main() -> None:
    parser = script_parser(__doc__, __file__, suffix="")
    parser.add_argument("--network", type=Path, action="append", metavar="CHECKPOINT")
    parser.add_argument("--work", type=Path, help="folder of the exported and quantised graphs")
    parser.add_argument("--aside", type=Path, help="folder of photographs that no other set has")
    parser.add_argument("--peers", default=sys.executable, help="Python with nncf, openvino and onnxruntime")
    parser.add_argument("--torchao", default=sys.executable, help="Python with torchao, and torch of the version here")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--program", action="append", default=[], help="judge and time only this; repeatable")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--most", type=int, help="judge at most so many images of each set")
    arguments = parsed(parser, rounds=1)
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.check:
            arguments.network, arguments.work = [small_network(Path(temporary))], Path(temporary) / "work"
        if not arguments.network or arguments.work is None:
            parser.error("expected --network CHECKPOINT and --work FOLDER")
        pythons = {"pt2e": arguments.torchao, "aotinductor": sys.executable}
        peers = {recipe: pythons.get(recipe.split("_")[0], arguments.peers) for recipe in RECIPES}
        for network in [Network(path, arguments.work, arguments.program) for path in arguments.network]:
            parts = arguments.part or PARTS
            answers, times = (arguments.output / f"{network.name}{suffix}" for suffix in (".json", ".speed.json"))
            if "prepare" in parts:
                network.prepare(peers, arguments.aside)
            if "judge" in parts:
                most = arguments.most or "all"
                limit = {name: os.environ[name] for name in ("ONEDNN_MAX_CPU_ISA",) if name in os.environ}
                with run_card.written(answers, "int8_real.py", timed=False, images_of_a_set=most, **limit) as results:
                    results |= judged(network, arguments.most)
            if "speed" in parts:
                with run_card.written(times, "int8_real.py", rounds=arguments.rounds) as results:
                    results |= timed(network, arguments.rounds)
            if answers.exists() and times.exists():
                read = [json.loads(path.read_text(encoding="utf-8")) for path in (answers, times)]
                (arguments.output / f"{network.name}.svg").write_text(int8_plot(*read, batch="16"), encoding="utf-8")


if __name__ == "__main__":
    main()
