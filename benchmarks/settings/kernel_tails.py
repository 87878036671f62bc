"""Is it faster to compute the last part of a vector, or to pad head dims and tokens to whole vectors?

Our attention kernel computes head dims and numbers of tokens that fill no whole number of vectors as they are. The
alternative is padding: zeros in the features of Q, K and V, or further tokens. The script calls the kernel with both
sizes on one thread, and divides the time of the size as it is by the time of the padded size. Padding would also have
to compute larger linear maps, or to copy, and to leave the further tokens out of the softmax; the script leaves this
cost out, so the ratio is the worst case of the kernel as it is.

The sizes are compared in every instruction set of this CPU, each in a process of its own, because the kernels choose
their set once in a process. The outputs are compared with each other, and with the formula in float64.

    python benchmarks/settings/kernel_tails.py [--rounds 40] [--check] [--output RESULT]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.options import parsed
from benchmarks.shared.places import ROOT, result_of
from gmmvit_deploy.bench import run_card
from gmmvit_deploy.bench.interleaved import turns
from gmmvit_deploy.bench.statistics import Ratio, ratio
from gmmvit_deploy.bench.words import ratio_words
from gmmvit_deploy.kernels.libraries import onnxruntime_library
from gmmvit_deploy.runtime.onnxruntime_program import why_not
from tests.kernels.kernel_arguments import MaskedAttention

SETS = ("avx512", "avx2", "neon")
"""The instruction sets in float32.  A set that this CPU does not have is left out."""
SIZES = {
    "head dim 20": (64, 20),
    "head dim 33": (64, 33),
    "head dim 40": (64, 40),
    "50 tokens": (50, 32),
    "197 tokens": (197, 64),
}
"""Name → (tokens, head dim)."""
_BATCH, _HEADS = 16, 4
_WHOLE = 16
_FLOAT32 = 1
_REPEATS = 8
_LARGEST_ERROR = 1e-4


class Attention:
    """A call of the kernel: Q, K and V stacked in the last dimension, (batch, tokens, 3 · heads · head dim)."""

    def __init__(self, library: ctypes.CDLL, stacked: NDArray[np.float32], head_dim: int, scale: float) -> None:
        self._library, self._stacked = library, stacked
        batch, tokens, width = stacked.shape
        columns = width // 3
        self.output = np.zeros((batch, tokens, columns), np.float32)
        start = stacked.ctypes.data
        self._what = MaskedAttention(
            q=start,
            k=start + 4 * columns,
            v=start + 8 * columns,
            out=self.output.ctypes.data,
            q_row=width,
            k_row=width,
            v_row=width,
            batch=batch,
            heads=columns // head_dim,
            queries=tokens,
            n=tokens,
            d=head_dim,
            arithmetic=_FLOAT32,
            scale=scale * float(np.log2(np.e)),
        )
        library.masked_attention_pieces.restype = ctypes.c_int64
        self._pieces = ctypes.c_int64(library.masked_attention_pieces(ctypes.byref(self._what)))

    def run(self) -> None:
        """Compute the attention.  Errors: SystemExit when the kernel does not take the size."""
        if self._library.masked_attention(ctypes.byref(self._what), ctypes.c_int64(0), self._pieces):
            raise SystemExit("the kernel does not take this size")

    def heads(self, head_dim: int) -> NDArray[np.float32]:
        """Return the output as (batch, tokens, heads, head dim)."""
        return self.output.reshape(*self.output.shape[:2], -1, head_dim)


def whole(size: int) -> int:
    """Return the next multiple of the largest vector."""
    return -(-size // _WHOLE) * _WHOLE


def formula(parts: NDArray[np.float32], scale: float) -> NDArray[np.float64]:
    """Return Softmax(Q Kᵀ · scale) V.  parts: (batch, tokens, 3, heads, head dim)."""
    query, key, value = parts.astype(np.float64).transpose(2, 0, 3, 1, 4)
    scores = query @ key.swapaxes(-1, -2) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: NDArray[np.float64] = (weights / weights.sum(axis=-1, keepdims=True)) @ value
    return output.transpose(0, 2, 1, 3)


def measured(library: ctypes.CDLL, tokens: int, head_dim: int, rounds: int) -> dict[str, Any]:
    """Time a size as it is, and padded.  Errors: SystemExit when an output is wrong."""
    generator = np.random.default_rng(tokens + head_dim)
    padded_dim, padded_tokens = whole(head_dim), tokens if head_dim % _WHOLE else whole(tokens)
    parts = np.zeros((_BATCH, padded_tokens, 3, _HEADS, padded_dim), np.float32)
    parts[..., :head_dim] = generator.standard_normal((_BATCH, padded_tokens, 3, _HEADS, head_dim), dtype=np.float32)
    as_is = np.ascontiguousarray(parts[:, :tokens, ..., :head_dim])
    scale = head_dim**-0.5
    calls = {
        "as it is": Attention(library, as_is.reshape(_BATCH, tokens, -1), head_dim, scale),
        "padded": Attention(library, parts.reshape(_BATCH, padded_tokens, -1), padded_dim, scale),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, timed in turns(list(calls), rounds, generator, warm_ups=2):
        start = time.perf_counter()
        for _ in range(_REPEATS):
            calls[name].run()
        if timed:
            times[name].append((time.perf_counter() - start) / _REPEATS * 1e3)
    off = float(np.abs(calls["as it is"].heads(head_dim) - formula(as_is, scale)).max())
    of_padded = float(np.abs(calls["padded"].heads(padded_dim) - formula(parts, scale)).max())
    if not max(off, of_padded) <= _LARGEST_ERROR:
        raise SystemExit(f"the outputs differ by {max(off, of_padded):.2g}, expected at most {_LARGEST_ERROR:g}")
    return {
        "padded_to": f"{padded_tokens} tokens, head dim {padded_dim}",
        "ms": {name: float(np.median(values)) for name, values in times.items()},
        "as_it_is_over_padded": ratio(times["as it is"], times["padded"]),
        "off": max(off, of_padded),
    }


def of_this_process(rounds: int) -> dict[str, Any]:
    """Return name of a size → its row, with the instruction set that the kernels chose in this process."""
    path, why = onnxruntime_library()
    why = why_not(path) if path is not None else why
    if path is None or why:
        raise SystemExit(f"nothing was measured: {why}")
    library = ctypes.CDLL(str(path))
    return {name: measured(library, tokens, head_dim, rounds) for name, (tokens, head_dim) in SIZES.items()}


def of_set(name: str, rounds: int) -> dict[str, Any] | None:
    """Return `of_this_process` of a process with this instruction set, or None if the CPU does not have the set."""
    command = [sys.executable, __file__, "--rounds", str(rounds), "--this-process"]
    environment = {**os.environ, "GMMVIT_CPU_ISA": name, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and "and this processor has" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()}")
    rows: dict[str, Any] = json.loads(done.stdout)
    for row in rows.values():
        row["as_it_is_over_padded"] = Ratio(**row["as_it_is_over_padded"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=result_of(__file__))
    parser.add_argument("--this-process", action="store_true", help="print the rows of this process's instruction set")
    arguments = parsed(parser, rounds=1)
    if arguments.this_process:
        rows = of_this_process(arguments.rounds)
        print(json.dumps(rows, default=asdict))
        return
    with run_card.written(arguments.output, Path(__file__).name, rounds=arguments.rounds) as results:
        results["sets"] = {}
        for name in SETS:
            rows = of_set(name, arguments.rounds)
            if rows is None:
                continue
            results["sets"][name] = rows
            for size, row in rows.items():
                print(f"{name}: {size} as it is: {ratio_words(row['as_it_is_over_padded'], 2)} of {row['padded_to']}")


if __name__ == "__main__":
    main()
