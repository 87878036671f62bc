"""Does a network of each of timm's architecture files export correctly?

For each file of timm that has a network below 45 million parameters, the script builds one of its smallest networks
with random weights (`network_of`), saves it as timm's train.py does, runs ``gmmvit export`` on the file in another
process, and records one result:

    exported     the graph's logits differ from the float64 logits of timm's own network by at most the limit of parity,
                 and the logits of different images differ by more than this limit
    unproven     as exported, but the logits of all images are equal within the limit
    refused      export ended with an error message that states the reason
    wrong        the difference exceeds the limit, or a logit is not finite
    crashed      export ended in another way, or its message says that the error was not expected
    too slow     export did not end within the time limit

The next run leaves out the networks with a result of the same versions; ``--model`` measures its networks again. The
script fails if a result is ``wrong``, ``crashed`` or ``too slow``.

    python benchmarks/timm_sweep.py [--model NAME] [--timeout 900] [--check]
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from benchmarks.shared import run_card
from benchmarks.shared.options import parsed, script_parser
from gmmvit_deploy.bundle.artifacts import open_bundle, tool_versions
from gmmvit_deploy.models.families.timm.network import require_timm
from gmmvit_deploy.parity.measures import ErrorMeasure, distance
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx
from gmmvit_deploy.tolerances import limit_from_noise

CLASSES = 10
SEED = 0
BATCHES, BATCH = 3, 8  # forward passes that measure the statistics of BatchNorm, and the images of a pass
DEFECTS = ("wrong", "crashed", "too slow")
SIDE = 128
"""The side of the images in pixels, for networks that take images of any size."""
OWN_SIZE = ("halonet_h1",)
"""Networks that take only images of timm's usual size, although timm's configuration does not say so."""
_NETWORKS = """
    cait_xxs24_224 coat_tiny convit_tiny convmixer_1024_20_ks9_p14 convnext_atto cpubone_nano crossvit_tiny_240
    cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deit_tiny_distilled_patch16_224 densenet121 dla46x_c
    dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0
    efficientvit_m0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050
    gmlp_ti16_224 halonet_h1 hardcorenas_a hgnetv2_b0 hiera_tiny_224 hieradet_small hrnet_w18_small iformer_t
    inception_next_atto inception_v3 inception_v4 lcnet_035 lcnetv2_small legacy_seresnet18 legacy_xception
    levit_128s lowformer_b0 mambaout_femto maxvit_pico_rw_256 mobilenetv2_035 mobileone_s1 mobilevit_xxs
    mvitv2_tiny nest_tiny nextvit_small nf_regnet_b0 pit_ti_224 poolformerv2_s12 pvt_v2_b0 rdnet_tiny
    regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d resnet10t resnetv2_18 rexnet_100 selecsls42
    sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224
    swinv2_cr_tiny_224 swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small
    visformer_tiny vit_relpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_dinov3_qkvb
    vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41 xcit_nano_12_p8_224
"""
NETWORKS = tuple(_NETWORKS.split())
"""A small network of each architecture file of timm that has a network below 45 million parameters."""


def images_of(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random images (batch, channels, height, width): patches of colour, and noise."""
    generator = torch.Generator().manual_seed(seed)
    batch, channels, height, width = shape
    patches = torch.randn(batch, channels, 7, 7, generator=generator)
    return F.interpolate(patches, (height, width)) + 0.3 * torch.randn(shape, generator=generator)


@torch.no_grad()
def network_of(name: str) -> tuple[nn.Module, tuple[int, int]]:
    """Build a network of timm with random weights; return also the (height, width) of its images.

    timm sets some parameters to equal values, such as a classifier head of zeros or a LayerScale of 1e-6, so that the
    layer has no effect before training. These parameters get random values. The statistics of BatchNorm are those of
    random images.
    """
    torch.manual_seed(SEED)
    network: nn.Module = require_timm().create_model(name, pretrained=False, num_classes=CLASSES)
    for path, parameter in network.named_parameters():
        if bool(parameter.min() == parameter.max()):
            matrix = path.endswith("weight") and parameter.dim() > 1
            deviation = 1 / math.sqrt(parameter[0].numel()) if matrix else 0.1
            parameter.add_(deviation * torch.randn_like(parameter))
    cfg: Any = network.pretrained_cfg
    own = cfg.get("fixed_input_size") or name in OWN_SIZE
    height, width = cfg["input_size"][1:] if own else (SIDE, SIDE)
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all passes
        network.train()
        for seed in range(BATCHES):
            network(images_of((BATCH, 3, height, width), seed))
    return network.eval(), (height, width)


def save_as_train_script(network: nn.Module, name: str, side: int, path: Path) -> None:
    """Save a checkpoint in the form of timm's train.py, without the state of the optimizer."""
    unset = dict.fromkeys(("gp", "bn_eps", "in_chans", "input_size", "crop_pct", "mean", "std"))
    args = Namespace(model=name, num_classes=CLASSES, img_size=side, model_kwargs={}, interpolation="", **unset)
    torch.save({"epoch": 0, "arch": name, "version": 2, "args": args, "state_dict": network.state_dict()}, path)


def exported(checkpoint: Path, bundle: Path, timeout_s: float) -> dict[str, Any]:
    """Run ``gmmvit export``, and return the result of the command."""
    words = ["export", str(checkpoint), "-o", str(bundle), "--json"]
    command = [sys.executable, "-m", "gmmvit_cli.main", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"result": "too slow", "reason": f"export did not end within {timeout_s:g} s"}
    if done.returncode == 0:
        return {"result": "exported"}
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    first = next((line for line in lines if line.startswith("Error: ")), "")
    expected = done.returncode == 1 and first and "unexpected" not in first
    reason = first.removeprefix("Error: ") or (lines[-1] if lines else f"exit status {done.returncode}")
    reason = reason.replace(f"{checkpoint}: ", "")
    return {"result": "refused" if expected else "crashed", "reason": reason}


@torch.inference_mode()
def compared(network: nn.Module, path: Path) -> dict[str, Any]:
    """Compare the logits of a bundle's graph in ONNX Runtime with those of timm's network, on the golden inputs."""
    bundle = open_bundle(path)
    golden = bundle.golden_set()
    tensors = torch.from_numpy(golden.tensors)
    trained = network(tensors).numpy()
    exact = network.double()(tensors.double()).numpy()
    measure = ErrorMeasure()
    measure.add(trained, exact)
    noise = measure.noise()
    limit = limit_from_noise(noise).largest
    difference = distance(program_from_onnx(bundle.onnx_path).run(golden.inputs), exact)
    spread = float(np.ptp(exact, axis=0).max())
    result = "wrong" if not difference <= limit else "exported" if spread > limit else "unproven"
    return {
        "result": result,
        "difference": difference,
        "limit": limit,
        "float32_noise": noise.largest,
        "largest_logit": noise.scale,
        "spread": spread,
        "skipped": bundle.manifest.export_skipped,
    }


def row_of(name: str, timeout_s: float) -> dict[str, Any]:
    """Export a network of timm, and return its row of the result."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, bundle = Path(folder) / "last.pth.tar", Path(folder) / "bundle"
        network, size = network_of(name)
        save_as_train_script(network, name, size[0], checkpoint)
        row = exported(checkpoint, bundle, timeout_s)
        if row["result"] == "exported":
            row = compared(network, bundle)
    file = require_timm().models.model_entrypoint(name).__module__.rpartition(".")[2]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    about = {"file": file, "parameters": parameters, "image_size": size}
    return {**about, **row, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--model", action="append", help="measure this network, also if it has a result; repeatable")
    parser.add_argument("--timeout", type=float, default=900, help="time limit of an export in seconds")
    arguments = parsed(parser, model=["lcnet_035"])
    torch.set_num_threads(1)
    versions = tool_versions("openvino", "timm")
    rows: dict[str, Any] = {}
    if arguments.output.exists():
        rows = json.loads(arguments.output.read_text(encoding="utf-8"))["networks"]
    done = [name for name, row in rows.items() if row["versions"] == versions]
    for name in arguments.model or [name for name in NETWORKS if name not in done]:
        with run_card.written(arguments.output, "timm_sweep.py", timed=False, seed=SEED, classes=CLASSES) as results:
            rows[name] = {**row_of(name, arguments.timeout), "versions": versions}
            print(name, rows[name], flush=True)
            results["networks"] = {each: rows[each] for each in sorted(rows)}
    if defects := [f"{name}: {row['result']}" for name, row in rows.items() if row["result"] in DEFECTS]:
        raise SystemExit("\n".join(defects))


if __name__ == "__main__":
    os.nice(10)
    main()
