"""Kernels of random shapes and random networks compute what float64 computes; each run draws other cases.

    GMMVIT_RANDOM_MINUTES   how long to draw: 10 minutes by default

Hypothesis reduces a fault, and prints its case: ``check_kernel(**case)`` or ``check_network(**case)`` repeats it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.inference.cores import int8_saturates
from gmmvit_deploy.inference.onnxruntime_program import OnnxRuntimeProgram
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram, UnusedKernelsError
from gmmvit_deploy.inference.precision import SPECS, Precision
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_onnx
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.conftest import has_bf16
from tests.exact import exact_logits
from tests.models.families.small_models import SMALL, distinct_model, random_images
from tests.runtimes.kernels.test_instruction_sets import LACKS, compiled_program, cplusplus

MINUTES = float(os.environ.get("GMMVIT_RANDOM_MINUTES") or 10)
IMAGES = 17
SETS = (("avx2", "1"), ("avx512", "1"), ("avx512-bf16", "1"), ("avx512-bf16", "2"), ("neon", "1"), ("neon-bf16", "2"))
"""(instruction set, arithmetic of attention as masked_attention.h numbers it)."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(60 * MINUTES + 600)]  # hypothesis reduces for up to 300 s
Case = dict[str, Any]


def search(cases: st.SearchStrategy[Case], check: Callable[..., None], seconds: float) -> None:
    """Draw and check cases until the time is over, and at least one."""
    end, count = time.monotonic() + seconds, 0

    @settings(derandomize=False, deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
    @given(cases)
    def check_some(case: Case) -> None:
        nonlocal count, end
        if count and time.monotonic() > end:
            return
        count += 1
        try:
            check(**case)
        except SpecError:
            reject()
        except Exception:
            end = float("inf")  # hypothesis reduces the case
            raise

    check_some()
    while time.monotonic() < end:
        check_some()


# ---- kernels ---------------------------------------------------------------------------------------------------------


@functools.cache
def program() -> Path:
    return compiled_program(cplusplus(), Path(tempfile.mkdtemp()) / "program")


def run_kernel(instruction_set: str, arithmetic: str, kind: str, *numbers: float) -> tuple[int, str]:
    command = [program(), instruction_set, arithmetic, kind, *map(str, numbers)]
    environment = {**os.environ, "GMMVIT_CPU_ISA": instruction_set}
    answer = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    return answer.returncode, answer.stdout.strip() + answer.stderr.strip()


def check_kernel(kind: str, instruction_set: str, arithmetic: str, **sizes: int) -> None:
    """Compare a kernel with its formula in float64, within the limits of against_formula.c.

    sizes: as `kernels` draws them; those that are not possible together are not computed.
    """
    if kind != "attention":
        sizes = {name: size if name == "adds" else max(size, 1) for name, size in sizes.items()}
        numbers = [16 * size if name in ("depth", "width") else size for name, size in sizes.items()]
    else:
        batch, heads, d, tokens = (max(1, sizes[name]) for name in ("batch", "heads", "d", "tokens"))
        grid, mixings, windows = (sizes[name] for name in ("grid", "mixings", "windows"))
        n = grid * grid + sizes["class_token"] if grid else tokens
        queries = 1 if sizes["one_query"] and not grid else n
        masked, step = int(bool(sizes["masked"] or grid)), 0.02 * sizes["int8"]
        windows = 0 if mixings else windows
        rotation = 0 if mixings or d % 2 or sizes["rotation"] == 4 else sizes["rotation"] % 7
        numbers = [batch, heads, queries, n, d, masked, mixings, windows, step, grid, sizes["shared"], 0, rotation]
    status, text = run_kernel(instruction_set, arithmetic, kind, *numbers)
    assert status == 0, f"status {status}: {text}"


@st.composite
def kernels(draw: st.DrawFn) -> Case:
    instruction_set, arithmetic = draw(st.sampled_from(sets()))
    case: Case = {"instruction_set": instruction_set, "arithmetic": arithmetic}
    kind = draw(st.sampled_from(["attention", "attention", "attention", "norm", "product"]))
    largest = {
        "attention": {
            "batch": 4,
            "heads": 16,
            "tokens": 150,
            "d": 150,
            "grid": draw(st.sampled_from([0, 12])),
            "mixings": 2,
            "class_token": 1,
            "one_query": 1,
            "masked": 1,
            "windows": 3,
            "int8": 1,
            "shared": 1,
            "rotation": 6,
        },
        "norm": {"adds": 1, "rows": 70, "width": 24},
        "product": {"rows": 200, "depth": 24, "width": 24},
    }
    return {"kind": kind, **case, **{name: draw(st.integers(0, size)) for name, size in largest[kind].items()}}


@functools.cache
def sets() -> list[tuple[str, str]]:
    return [each for each in SETS if run_kernel(*each, "norm", 0, 1, 16)[0] != LACKS]


@pytest.mark.integration
def test_random_kernels() -> None:
    assert sets()
    search(kernels(), check_kernel, 60 * MINUTES / 4)


# ---- networks --------------------------------------------------------------------------------------------------------


def spec_of(name: str, changes: Case) -> ModelSpec:
    """Return the spec of a small model with changes; of ``timm``, the spec of timm's ViT with these arguments.

    Errors: SpecError when there is no such model.
    """
    if name == "timm":
        side = 4 * max(1, changes["grid"])
        args = {"img_size": side, "patch_size": 4, "depth": 1, "num_classes": 10, "num_heads": max(1, changes["heads"])}
        args |= {"embed_dim": 8 * args["num_heads"], "qk_norm": bool(changes["qk_norm"])}
        return TimmSpec(
            architecture="vit_tiny_patch16_224", model_args=args, image_size=side, classes=10, mask=MaskSpec()
        )
    (small,) = [each for each in SMALL if str(each) == name]
    return replace(small.spec, **changes)


def programs_of(
    folder: Path, spec: ModelSpec, images: np.ndarray, exact: np.ndarray, *, int8: bool, threads: int
) -> Iterator[tuple[str, Any, float]]:
    """Yield (name, program, limit of its logits) for the programs of a network that run here."""
    model, path = distinct_model(spec), folder / "model.onnx"
    with torch.inference_mode():
        noise = float(np.abs(model(torch.from_numpy(images)).numpy() - exact).max())
    measured, recorded = Noise(largest=noise, rms=0.0, scale=float(np.abs(exact).max())), None
    if int8:
        options: Any = {"preprocessing": None, "max_batch": IMAGES, "calibration": [images], "for_cpu": True}
        graph = graph_from_model(model, "int8", **options).model
        recorded = float(np.abs(emulated_logits(graph, images, name="int8") - exact).max())
    else:
        graph = onnx_from_model(fold(model).model, preprocessing=None, max_batch=IMAGES)
    ir.save(graph, path)
    precisions: list[Precision] = ["int8"] if int8 else ["fp32", "bf16"] if has_bf16() else ["fp32"]
    for precision in precisions:
        limit = limit_from_noise(measured, precision, recorded=recorded).largest
        if precision != "bf16":
            session = OnnxRuntimeProgram(lambda count: session_from_onnx(path, threads=count), threads=threads)
            yield f"onnxruntime:{precision}", session, limit
        for kernels in (None, our_kernels(precision)[0]):
            try:
                program = OpenVinoProgram(str(path), hint=SPECS[precision].openvino, threads=threads, kernels=kernels)
            except UnusedKernelsError:
                continue
            yield f"openvino{'+kernels' if kernels else ''}:{precision}", program, limit


def check_network(name: str, int8: int, rows: int, threads: int, **changes: Any) -> None:
    """Compare every program's logits of a batch with PyTorch's in float64, within the project's limits."""
    spec, rows = spec_of(name, changes), max(1, rows)
    if int8 and int8_saturates():
        return
    images = random_images(spec, IMAGES)
    exact = exact_logits(distinct_model(spec), images)
    with tempfile.TemporaryDirectory() as folder:
        made = programs_of(Path(folder), spec, images, exact, int8=bool(int8), threads=max(1, threads))
        for program, answers, limit in made:
            off = float(np.abs(answers.run(images[:rows]) - exact[:rows]).max())
            assert off <= limit, f"{program} differs from PyTorch by {off:.3g}, and at most {limit:.3g} is right"


@st.composite
def networks(draw: st.DrawFn) -> Case:
    """Draw a small network, often with as many heads as tokens: an operator may confuse dimensions of the same size."""
    name = draw(st.sampled_from(["timm", *map(str, SMALL)]))
    case = {"name": name, "int8": draw(st.sampled_from([0, 0, 1]))}
    case |= {"rows": draw(st.integers(1, IMAGES)), "threads": draw(st.integers(1, 2))}
    grid = draw(st.integers(1, 3))
    heads = st.integers(1, 8) | st.sampled_from([grid * grid, grid * grid + 1])
    if name == "timm":
        return {**case, "grid": grid, "heads": draw(heads), "qk_norm": draw(st.integers(0, 1))}
    spec = spec_of(name, {})
    changes: Case = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name == "heads":
            changes["heads"] = tuple(draw(heads) for _ in value) if isinstance(value, tuple) else draw(heads)
        elif field.name == "head_dim":
            changes["head_dim"] = draw(st.sampled_from([16, 8, 12, 33]))
        elif field.name == "patch_size":
            changes["image_size"] = grid * value
    try:
        spec_of(name, changes)
    except SpecError:
        reject()
    return {**case, **changes}


@pytest.mark.integration
def test_random_networks() -> None:
    search(networks(), check_network, 60 * MINUTES * 3 / 4)
