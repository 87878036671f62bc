"""What do the engines contain, for each family, precision and mask, and what do the mask and its folding change?

tensorrt-rtx builds engines of the paper's models (32×32, 10 classes, K = 5 a head, random weights) for compute
capability 8.9, without a GPU. The result has for each engine the numbers of layers, of kernels (layers except shape
arithmetic), of attentions that a single kernel computes, and of products outside the type of the precision; its size
and build time.

For masked models in fp16, the script also builds, and compares with PyTorch's float32 logits:

    twin        the same graph with M = 1
    unfolded    the trained module exported in half precision without folding, as users do without this project

For each head dim, it builds a small ViT as it is and with the head dim padded with zeros; and the systems of
`benchmarks/shared/systems.py` at the size of their presets, with their plain twins in fp16.

    python benchmarks/engines.py [--family vit …] [--check] [--output RESULT] [--systems-output FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from benchmarks.shared import run_card
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.places import FAMILIES, result_of
from benchmarks.shared.systems import SYSTEMS, system_model
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.inference.precision import CALIBRATED, PRECISIONS, Precision
from gmmvit_deploy.models.families import family_named, model_from_spec, preset_spec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import MaskSpec, input_shape
from gmmvit_deploy.runtimes.engines.card import LAYERS_FILE, EngineCard
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_onnx
from gmmvit_deploy.runtimes.engines.flavors import find_flavor
from gmmvit_deploy.runtimes.engines.layers import layers_from_text
from gmmvit_deploy.runtimes.engines.options import BuildOptions, profile_from
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from tests.runtimes.engines.unfolded import unfolded_half

MASKS = {"gmm": MaskSpec(kind="gmm", kernels=5), "elm": MaskSpec(kind="elm"), "plain": MaskSpec()}
HEAD_DIMS = (6, 8, 9, 12, 16, 20, 21, 24, 32)
PROFILE = profile_from("1:8:64")
CAPABILITY = "8.9"


def model_of(family: str, mask: MaskSpec) -> Model:
    torch.manual_seed(0)
    return model_from_spec(preset_spec(family, classes=10, image_size=32, mask=mask)).eval()


def images(model: Model) -> np.ndarray:
    """Return 32 random images; for large images, fewer images of the same area in total, and at least 4."""
    shape = input_shape(model.spec)
    count = max(4, min(32, 32 * 64**2 // (shape[1] * shape[2])))
    return np.random.default_rng(0).standard_normal((count, *shape), dtype=np.float32)


def built(graph: ir.Model, precision: Precision, folder: Path, *, twin: bool = False) -> EngineCard:
    path = folder / "model.onnx"
    ir.save(graph, path)
    options = BuildOptions(precision=precision, capabilities=(CAPABILITY,), profiles=(PROFILE,))
    flavor = find_flavor("tensorrt-rtx")
    return engine_from_onnx(path, options, flavor, out=folder / "engine", mask_cost=twin, force=True).card


def summary(card: EngineCard, folder: Path) -> dict[str, Any]:
    listed = layers_from_text((folder / "engine" / LAYERS_FILE).read_text())
    reasons = sorted({proof.reason for proof in card.attentions if proof.reason})
    return {
        "layers": len(listed),
        "kernels": sum(layer.precision is not None for layer in listed),
        "attentions": len(card.attentions),
        "fused": sum(proof.fused for proof in card.attentions),
        "why_not": reasons,
        "misses": len(card.misses),
        "bytes": card.size_bytes,
        "build_seconds": card.build_seconds,
        "shares": {kind: round(share, 3) for kind, share in card.shares[CAPABILITY].items()},
    }


def engine(model: Model, precision: Precision, folder: Path, *, masked: bool) -> dict[str, Any]:
    """Build an engine and return its row of the table."""
    calibration = [images(model)] if precision in CALIBRATED else None
    prepared = graph_from_model(model, precision, preprocessing=None, max_batch=64, calibration=calibration)
    with_more = masked and precision == "fp16"
    card = built(prepared.model, precision, folder, twin=with_more)
    row = summary(card, folder)
    if with_more and card.mask_cost is not None:
        cost = card.mask_cost
        row["twin"] = {
            "layers": cost.twin_layers,
            "bytes": cost.twin_bytes,
            "kernels_more": cost.kernels - cost.twin_kernels,
        }
        row["unfolded"] = unfolded(model, prepared.model, folder)
    return row


def unfolded(model: Model, folded: ir.Model, folder: Path) -> dict[str, Any]:
    """Return the `summary` of the engine of the unfolded export in half precision, and the errors of both graphs."""
    half = unfolded_half(model, folder / "unfolded.onnx")
    row = summary(built(half, "fp16", folder), folder)
    with torch.inference_mode():
        expected = model(torch.from_numpy(images(model))).numpy()
    for name, graph in (("error", half), ("folded_error", folded)):
        logits = emulated_logits(graph, images(model), name=name)
        row[name] = float(np.abs(logits - expected).max() / np.abs(expected).max())
    return row


def system_rows(name: str, precisions: Sequence[Precision], folder: Path) -> dict[str, dict[str, Any]]:
    """Return precision → the row of the engine of a system; the row of fp16 has the comparison with the plain twin."""
    system = SYSTEMS[name]
    model = system_model(system.spec)
    rows = {precision: engine(model, precision, folder, masked=False) for precision in precisions}
    if system.plain is not None and "fp16" in rows:
        twin = engine(system.plain(model), "fp16", folder, masked=False)
        rows["fp16"]["twin"] = {
            "layers": twin["layers"],
            "bytes": twin["bytes"],
            "kernels_more": rows["fp16"]["kernels"] - twin["kernels"],
        }
    return rows


def head_dims(folder: Path) -> dict[str, dict[str, Any]]:
    """Return head dim → form (unpadded or padded) → the `summary` of the engine of a small ViT."""
    vit = preset_spec("vit", classes=10, image_size=32, mask=MASKS["gmm"])
    rows = {}
    for head_dim in HEAD_DIMS:
        torch.manual_seed(0)
        model = model_from_spec(replace(vit, depth=2, heads=4, head_dim=head_dim, dim=96)).eval()
        rows[str(head_dim)] = {}
        for name, padded in (("as_it_is", False), ("padded", True)):
            prepared = graph_from_model(model, "fp16", preprocessing=None, max_batch=64, padded=padded)
            rows[str(head_dim)][name] = summary(built(prepared.model, "fp16", folder), folder)
    return rows


def family_results(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    results["families"] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in arguments.family or FAMILIES:
            rows = results["families"].setdefault(family, {})
            for kind in arguments.mask or MASKS:
                if kind not in family_named(family).mask_kinds:
                    continue
                model = model_of(family, MASKS[kind])
                rows[kind] = {
                    precision: engine(model, precision, folder, masked=kind != "plain")
                    for precision in arguments.precision or PRECISIONS
                }
                print_rows(f"{family} {kind}", rows[kind])
        if not arguments.no_head_dims:
            results["head_dims"] = head_dims(folder)


def print_rows(name: str, rows: dict[str, dict[str, Any]]) -> None:
    for precision, row in rows.items():
        print(f"{name} {precision}: {row['kernels']} kernels, {row['fused']}/{row['attentions']} fused", flush=True)


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be repeated")
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="only this system; may be repeated")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="only this precision; may be repeated")
    parser.add_argument("--mask", choices=MASKS, action="append", help="only this mask; may be repeated")
    parser.add_argument("--no-head-dims", action="store_true", help="leave the table of head dims out")
    systems_output = result_of(__file__, suffix="")
    parser.add_argument(
        "--systems-output", type=Path, default=systems_output, help="folder for the results of the systems"
    )
    arguments = parsed(parser, family=["vit"], system=None, precision=["fp16"], mask=["gmm"], no_head_dims=True)
    flavor = find_flavor("tensorrt-rtx")
    settings = {"flavor": f"{flavor.name} {flavor.version}", "capability": CAPABILITY}
    everything = not (arguments.family or arguments.system)
    if arguments.family or everything:
        with run_card.written(arguments.output, "engines.py", timed=False, **settings) as results:
            family_results(arguments, results)
    for name in arguments.system or (SYSTEMS if everything else ()):
        output = arguments.systems_output / f"{name}.json"
        with (
            run_card.written(output, "engines.py", timed=False, **settings) as results,
            tempfile.TemporaryDirectory() as temporary,
        ):
            results["preset"] = SYSTEMS[name].full_size
            results["precisions"] = system_rows(name, arguments.precision or PRECISIONS, Path(temporary))
            print_rows(name, results["precisions"])


if __name__ == "__main__":
    main()
