"""Do timm's architectures export correctly, in which precisions, and how fast compared with the straight export?

Each of the 26 architectures has the size of the released models and random weights, which `perturbed` draws such that
the attention weights are uneven. The script saves a state dict, exports the state dict as `gmmvit export` does, and
checks:

    batches      the largest difference of ONNX Runtime's logits from PyTorch's, at batches of 1, 2, 3 and the largest
    attention    how far the logits move when the weights of a single attention are made equal, divided by the limit of
                 parity: the smallest ratio of all attentions. The script stops if a ratio is not above 100, because
                 the comparison of the logits could then overlook a wrong attention
    precisions   the distance of the graph, cast to fp16 and bf16, from PyTorch's float64 logits, with all roundings
                 emulated; or the operators without a known role, which leave the model in float32
    kernels      the number of attentions that our CPU kernel computes, and the reason for each other attention
    speed        the time of the straight export (``torch.onnx.export`` of the unchanged model, in ONNX Runtime with
                 default options, and in OpenVINO) divided by the time of our export in OpenVINO with our kernels. The
                 programs take turns in the same process. Their logits are checked in the same run. With ``--nncf``,
                 also our int8 and the straight export quantised by NNCF, both calibrated with the same random images;
                 their logits are not checked, as random weights do not show what int8 costs

The checks and the speed of a model are separate results with separate run cards, so that the times can be measured on a
quiet machine: ``--part checks`` exports to ``--exports``, and ``--part speed`` reads this folder.

    python benchmarks/timm_models.py [--model NAME] [--rounds 10] [--part checks|speed] [--nncf PYTHON]
        [--served-batch] [--check]
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from benchmarks.shared import run_card
from benchmarks.shared.cpu_programs import cpu_program, nncf_in_openvino, runner_of, straight_openvino
from benchmarks.shared.interleaved import Program
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.straight_export import straight_graph
from benchmarks.shared.timm_architectures import ARCHITECTURES, Architecture, network_of
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.declared import declared_role
from gmmvit_deploy.inference.matcher import Refusal, attentions_in, summary_of
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.measure.turns import seconds_in_turn
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx, session_from_onnx
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph, read_graph
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.uneven_attention import attention_effects

MAX_BATCH = 8
BATCHES = (1, 2, 3, MAX_BATCH)
SPEED_BATCHES = (1, 8)
SERVED_BATCH = 64
INT8_IMAGES = 64
MIN_EFFECT = 100.0
HALVES: tuple[Precision, ...] = ("fp16", "bf16")
_STRAIGHT, _WEIGHTS, _BUNDLE = "straight.onnx", "weights.pth", "bundle"


class Exported:
    """The exports of an architecture in a folder: the state dict, the bundle, and the straight export."""

    def __init__(self, name: str, architecture: Architecture, exports: Path) -> None:
        self.name, self.architecture = name, architecture
        self.folder = exports / name.replace(":", "_")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.network = network_of(name, architecture)

    def images(self, batch: int, seed: int) -> Tensor:
        side = self.architecture.size
        return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))

    def bundle(self) -> Bundle:
        """Return the bundle, exported as by ``gmmvit export``.  Errors: as `bundle_from_checkpoint`."""
        if (self.folder / _BUNDLE).exists():
            return open_bundle(self.folder / _BUNDLE)
        torch.save(self.network.state_dict(), self.folder / _WEIGHTS)
        options = ExportOptions(input_kind="tensor", max_batch=MAX_BATCH)
        hints = self.architecture.hints(self.name)
        return bundle_from_checkpoint(self.folder / _WEIGHTS, self.folder / _BUNDLE, options, hints=hints)

    def model(self) -> Model:
        return load_checkpoint(self.folder / _WEIGHTS, self.architecture.hints(self.name)).model.eval()

    def straight(self) -> Path:
        """Return the graph that PyTorch exports from the unchanged network.

        The exporter cannot convert attention over windows in five dimensions (Hiera). Such a network is exported
        without fused attention functions, as timm's argument ``exportable`` makes the network.
        """
        path = self.folder / _STRAIGHT
        if not path.exists():
            shape = tuple(self.images(1, 0).shape[1:])
            try:
                graph = straight_graph(self.network, shape, MAX_BATCH)
            except torch.onnx.OnnxExporterError:
                unfused = copy.deepcopy(self.network)
                for module in unfused.modules():
                    if hasattr(module, "fused_attn"):
                        module.fused_attn = False  # type: ignore[assignment]  # nn.Module types attributes as tensors
                graph = straight_graph(unfused, shape, MAX_BATCH)
            ir.save(graph, path)
        return path


def logits_of(network: nn.Module, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return PyTorch's logits of the network in float32 and in float64."""
    with torch.inference_mode():
        exact = copy.deepcopy(network).double()(images.double())
        return network(images).numpy(), exact.numpy()


def noise_of(logits: np.ndarray, exact: np.ndarray) -> Noise:
    measure = ErrorMeasure()
    measure.add(logits, exact)
    return measure.noise()


def checks_of(exported: Exported) -> dict[str, Any]:
    """Return the row of an architecture: the reason if the export is refused, else the results of all checks.

    Errors: SystemExit when logits differ, or when the effect of an attention is too small.
    """
    try:
        bundle = exported.bundle()
    except GmmvitError as exc:
        return {"refused": str(exc)}
    model = ir.load(bundle.onnx_path)
    images = exported.images(MAX_BATCH, 1)
    logits, exact = logits_of(exported.network, images)
    noise = noise_of(logits, exact)
    limit = limit_from_noise(noise).largest
    run = program_from_onnx(bundle.onnx_path).run
    differences = {str(size): distance(run(images.numpy()[:size]), exact[:size]) for size in BATCHES}
    if not max(differences.values()) <= limit:
        raise SystemExit(f"{exported.name}: differences {differences}, expected at most {limit:.2g}")
    effects = [effect / limit for effect in attention_effects(exported.model(), images[:4])]
    if effects and not min(effects) > MIN_EFFECT:
        raise SystemExit(f"{exported.name}: {effects} limits, expected more than {MIN_EFFECT:g} for each attention")
    matches = attentions_in(read_graph(bundle.onnx_path))
    return {
        "nodes": len(model.graph),
        "straight_nodes": len(ir.load(exported.straight()).graph),
        "difference": differences,
        "limit": limit,
        "largest_logit": noise.scale,
        "least_effect": min(effects, default=None),
        "softmaxes": len(effects),
        "export_parity": bundle.manifest.export_parity,
        "export_skipped": bundle.manifest.export_skipped,
        "precisions": precisions_of(model, images[:2], exact[:2], noise),
        "fused": sum(not isinstance(match, Refusal) for match in matches),
        "reasons": Counter(match.reason for match in matches if isinstance(match, Refusal)),
        "summary": summary_of(matches),
    }


def precisions_of(model: ir.Model, images: Tensor, exact: np.ndarray, noise: Noise) -> dict[str, Any]:
    """Return precision → distance and limit, or the operators that leave the model in float32."""
    unknown = Counter(node.op_type for node in model.graph if declared_role(node) == "unknown")
    if unknown:
        return {"unknown_operators": dict(unknown)}
    rows = {}
    for precision in HALVES:
        off = distance(emulated_logits(cast_graph(model, precision), images.numpy(), name=precision), exact)
        rows[precision] = {"distance": off, "limit": limit_from_noise(noise, precision).largest}
    return rows


def int8_programs(exported: Exported, nncf: str) -> dict[str, Program]:
    """Return the programs of the straight export quantised by NNCF, and of our int8 graph in OpenVINO."""
    shape = tuple(exported.images(1, 0).shape[1:])
    peer = nncf_in_openvino(exported.straight(), shape, nncf, INT8_IMAGES)
    images = np.random.default_rng(0).standard_normal((INT8_IMAGES, *shape), dtype=np.float32)
    batches = [images[start : start + MAX_BATCH] for start in range(0, INT8_IMAGES, MAX_BATCH)]
    path = exported.folder / "int8.onnx"
    graph = graph_from_model(
        exported.model(), "int8", preprocessing=None, max_batch=MAX_BATCH, calibration=batches, for_cpu=True
    )
    ir.save(graph.model, path)
    runner, _ = runner_of(path, "openvino+kernels:int8", "int8")
    return {"nncf openvino:int8": peer, runner: cpu_program(path, runner, "int8")}


def speed_of(exported: Exported, rounds: int, nncf: str | None, batches: Sequence[int]) -> dict[str, Any]:
    """Return batch → times of the programs, the ratios to ours, and the distances of their logits."""
    path = exported.bundle().onnx_path
    kernels, _ = kernels_for_graph(path, "fp32")
    ours = OpenVinoProgram(str(path), hint="f32", kernels=kernels)
    session = session_from_onnx(exported.straight())
    programs: dict[str, Program] = {
        "straight export": lambda images: session.run(["logits"], {"tensor": images})[0],
        "straight openvino": straight_openvino(exported.straight(), "fp32"),
        "openvino+kernels" if kernels else "openvino": ours.run,
    }
    checked, int8 = len(programs), {} if nncf is None else int8_programs(exported, nncf)
    programs |= int8
    rows: dict[str, Any] = {}
    for batch in batches:
        images = exported.images(batch, batch)
        runs = [partial(program, images.numpy()) for program in programs.values()]
        seconds = seconds_in_turn(runs, rounds=rounds)
        answers = [run() for run in runs[:checked]]
        logits, exact = logits_of(exported.network, images)
        limit = limit_from_noise(noise_of(logits, exact)).largest
        offs = [distance(answer, exact) for answer in answers]
        if not all(off <= limit for off in offs):  # also if a distance is NaN: logits that are not finite
            raise SystemExit(f"{exported.name}: the logits differ by {offs}, expected at most {limit:.2g}")
        rows[str(batch)] = {
            "programs": list(programs),
            "median_ms": (1e3 * np.median(seconds, axis=1)).tolist(),
            "times_faster_than_straight_export": ratio(seconds[0], seconds[2]),
            "times_faster_than_straight_openvino": ratio(seconds[1], seconds[2]),
            **({"int8_times_faster_than_nncf": ratio(seconds[3], seconds[4])} if int8 else {}),
            "off": offs,
            "limit": limit,
        }
    return rows


def main() -> None:
    parser = script_parser(__doc__, __file__, suffix="")
    parser.add_argument("--model", choices=list(ARCHITECTURES), action="append", help="only this model; repeatable")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each program and batch")
    parser.add_argument("--part", choices=("checks", "speed"), help="only the checks or only the speed")
    parser.add_argument("--exports", type=Path, help="folder that keeps the exports; the next run reads them")
    parser.add_argument("--nncf", metavar="PYTHON", help="the Python of an environment with NNCF; also times int8")
    parser.add_argument("--served-batch", action="store_true", help=f"also time {SERVED_BATCH} images at a time")
    arguments = parsed(parser, model=["test_vit3"], rounds=1)
    names: Sequence[str] = arguments.model or list(ARCHITECTURES)
    batches = (*SPEED_BATCHES, SERVED_BATCH) if arguments.served_batch else SPEED_BATCHES
    with tempfile.TemporaryDirectory() as folder:
        exports, failures = arguments.exports or Path(folder), []
        for name in names if arguments.part != "speed" else ():
            exported = Exported(name, ARCHITECTURES[name], exports)
            output = arguments.output / f"{exported.folder.name}.json"
            try:
                with run_card.written(output, "timm_models.py", timed=False, max_batch=MAX_BATCH) as results:
                    results.update(model=name, **checks_of(exported))
                    print(name, results, flush=True)
            except SystemExit as exc:
                failures.append(str(exc))
                print(failures[-1], flush=True)
        if failures:
            raise SystemExit("\n".join(failures))
        for name in names if arguments.part != "checks" else ():
            exported = Exported(name, ARCHITECTURES[name], exports)
            output = arguments.output / f"{exported.folder.name}.speed.json"
            with run_card.written(output, "timm_models.py", rounds=arguments.rounds) as results:
                results.update(model=name, batches=speed_of(exported, arguments.rounds, arguments.nncf, batches))
                print(name, results, flush=True)


if __name__ == "__main__":
    main()
