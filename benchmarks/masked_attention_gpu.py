"""Is attention with a constant mask as fast as attention without one, if a single GPU kernel computes it?

The attention is Softmax((Q Kᵀ/√d) ∘ M) V with a constant mask M (heads, N, N). PyTorch's fused attention has no mask
that multiplies. The programs, for each shape and data type:

    plain       torch.nn.functional.scaled_dot_product_attention: the plain twin, without the mask
    operators   four operators: product, mask, softmax, product
    compiled    the same operators, compiled with torch.compile
    flex        FlexAttention: ``score_mod`` multiplies each score by its entry of M inside the fused kernel

Shapes are those of the presets of the families, for a batch of 64, and a ViT-B at 224 pixels. Each program is a CUDA
graph, because the launches of small kernels take longer than the kernels; they take turns in each round, and the times
are those of CUDA events. Wrong outputs (formula in float64) stop the script.

    python benchmarks/masked_attention_gpu.py [--rounds 30] [--device cuda] [--check] [--output RESULT]

``--check --device cpu`` compares the outputs of small shapes on the CPU, and times nothing.
"""

from __future__ import annotations

import getpass
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.shared import run_card
from benchmarks.shared.interleaved import turns
from benchmarks.shared.options import parsed, script_parser
from benchmarks.shared.results import interval
from gmmvit_deploy.measure.statistics import ratio

PLAIN = "plain"
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPEATS = 20
_NOISES = 4.0
"""The largest difference from the formula, in machine epsilons of the data type times the largest |v|."""


class Shape(NamedTuple):
    """batch, heads, tokens, head_dim: the sizes of Q, K and V (batch, heads, tokens, head dim)."""

    batch: int
    heads: int
    tokens: int
    head_dim: int


SHAPES = {
    "vit": Shape(64, 12, 64, 16),
    "cait": Shape(64, 4, 64, 64),
    "pit, first stage": Shape(64, 2, 257, 48),
    "t2t, first stage": Shape(64, 1, 256, 64),
    "ViT-B at 224 pixels": Shape(64, 12, 196, 64),
}
SMALL = {"small": Shape(2, 2, 64, 16), "odd": Shape(1, 3, 50, 32)}


def mask_of(shape: Shape) -> Tensor:
    """Return a Gaussian mask (heads, N, N) over a grid whose rows have about √N tokens."""
    side = math.isqrt(shape.tokens - 1) + 1
    place = torch.arange(shape.tokens)
    row, column = place // side, place % side
    squared = (row[:, None] - row) ** 2 + (column[:, None] - column) ** 2
    widths = torch.linspace(2, side, shape.heads)
    return torch.exp(-squared / (2 * widths[:, None, None] ** 2))


def by_operators(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return Softmax((Q Kᵀ/√d) ∘ M) V."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5)
    return torch.softmax(scores * mask, dim=-1) @ value


def by_flex_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As `by_operators`, as a single kernel if the function is compiled."""

    def masked(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score * mask[head, row, column]

    output: Tensor = flex_attention(query, key, value, score_mod=masked)
    return output


def programs_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return name → program."""
    torch.compiler.reset()  # PyTorch compiles a function only for a limited number of shapes
    compiled = torch.compile(by_operators, dynamic=False)
    flex = torch.compile(by_flex_attention, dynamic=False)
    return {
        PLAIN: lambda: scaled_dot_product_attention(query, key, value),
        "operators": lambda: by_operators(query, key, value, mask),
        "compiled": lambda: compiled(query, key, value, mask),
        "flex": lambda: flex(query, key, value, mask),
    }


def captured(program: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the program as a CUDA graph.  Its runs write the same output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # what compiles or allocates once must do so before the capture
            program()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = program()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def differences(
    programs: dict[str, Callable[[], Tensor]], inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor
) -> dict[str, float]:
    """Return name of a program → its largest difference from the formula in float64.  Errors: SystemExit above the
    limit.
    """
    exact = [each.double() for each in inputs]
    masked, unmasked = by_operators(*exact, mask.double()), by_operators(*exact, torch.ones_like(mask).double())
    limit = _NOISES * torch.finfo(inputs[0].dtype).eps * float(inputs[2].abs().max())
    off: dict[str, float] = {}
    for name, program in programs.items():
        truth = unmasked if name == PLAIN else masked
        off[name] = float((program().double() - truth).abs().max())
        if not off[name] <= limit:
            raise SystemExit(f"{name}: the outputs differ by {off[name]:.2g}, expected at most {limit:.2g}")
    return off


def milliseconds(program: Callable[[], Tensor]) -> float:
    """Return the time of a run on the GPU, as the mean of a turn."""
    program()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        program()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed / _REPEATS


def measured(shape: Shape, dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    """Check the outputs of every program; time them unless ``rounds`` is 0.

    Returns name → off: the largest difference; ms: the median time; over_plain: the time / that of plain.
    """
    generator = torch.Generator().manual_seed(shape.tokens)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    mask = mask_of(shape).to(device, dtype)
    with torch.inference_mode():
        programs = programs_of(query, key, value, mask)
        if device == "cuda":
            programs = {name: captured(program) for name, program in programs.items()}
        off = differences(programs, (query, key, value), mask)
        rows: dict[str, Any] = {name: {"off": off[name]} for name in programs}
        ms: dict[str, list[float]] = {name: [] for name in programs}
        for name, timed in turns(list(programs), rounds, np.random.default_rng(0), warm_ups=2 if rounds else 0):
            elapsed = milliseconds(programs[name])
            if timed:
                ms[name].append(elapsed)
    for name in programs if rounds else ():
        rows[name] |= {"ms": float(np.median(ms[name])), "over_plain": ratio(ms[name], ms[PLAIN])}
    return rows


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parsed(parser, check="compare the outputs, and time nothing")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("nothing was measured: expected a GPU that PyTorch can use; --check --device cpu needs none")
    if arguments.device == "cpu" and not arguments.check:
        raise SystemExit("--device cpu goes with --check: the times are those of a GPU")
    if arguments.device == "cpu":
        # FlexAttention's code for CPUs is right for one number of threads, which PyTorch's cache does not compare.
        name = f"torchinductor_{getpass.getuser()}_{torch.get_num_threads()}_threads"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir(), name))
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = SHAPES if arguments.device == "cuda" else SMALL
    types = TYPES if arguments.device == "cuda" else {"float32": torch.float32}

    def rows_of(rounds: int) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for name, shape in shapes.items():
            for label, dtype in types.items():
                row = rows[f"{name}, {label}"] = measured(shape, dtype, arguments.device, rounds)
                for program, values in row.items():
                    time = f", {values['ms']:.3f} ms, {interval(values['over_plain'])} of plain" if rounds else ""
                    print(f"{name}, {label}: {program}: off by {values['off']:.2g}{time}", flush=True)
        return rows

    if arguments.check:
        rows_of(0)
        return
    with run_card.written(arguments.output, "masked_attention_gpu.py", rounds=arguments.rounds) as results:
        results["attentions"] = rows_of(arguments.rounds)


if __name__ == "__main__":
    main()
