"""Does a runner give the answers that the trained model gives?

Two references: the golden logits that the bundle was made with, and eager PyTorch, rebuilt from
the bundle's weights, on fresh random inputs. Each at several batch sizes, since a runner may be
right at one and wrong at the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.engines.card import open_engine
from gmmvit_deploy.engines.flavors import FLAVORS
from gmmvit_deploy.engines.runner import EngineRunner
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.eager import EagerRunner
from gmmvit_deploy.runtime.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtime.runner import Runner
from gmmvit_deploy.runtime.triton import DEFAULT_MODEL, TritonRunner
from gmmvit_deploy.tolerances import Tolerance, fp32_tolerance, precision_tolerance
from gmmvit_deploy.variants import open_variant

__all__ = ["RUNNERS", "Comparison", "ParityResult", "batch_sizes", "check_parity", "open_runner"]

RUNNERS = ("eager", "onnxruntime", "tensorrt", "tensorrt-rtx", "triton-grpc", "triton-http")
_DEFAULT_URLS = {"triton-grpc": "grpc://localhost:8001", "triton-http": "http://localhost:8000"}
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One reference at one batch size.

    largest_abs, largest_rel: largest |found − wanted|, and the same over the largest |wanted|; NaN
    when something is not finite or of another shape.  limit: what largest_abs may be.
    agreement: share of rows whose argmax is the reference's.
    """

    reference: str
    batch: int
    largest_abs: float
    largest_rel: float
    limit: float
    agreement: float
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """All comparisons of one runner; ``passed`` only when each of them did."""

    runner: str
    bundle_sha256: str
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(comparison.passed for comparison in self.comparisons)

    def worst(self) -> Comparison:
        """The comparison that came closest to its limit, or overstepped it most."""
        return max(self.comparisons, key=lambda c: np.inf if np.isnan(c.largest_abs) else c.largest_abs / c.limit)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what is not finite becomes null."""
        worst = _finite(asdict(self.worst()))
        return {
            "passed": self.passed,
            "runner": self.runner,
            "bundle_sha256": self.bundle_sha256,
            **{name: worst[name] for name in ("largest_abs", "largest_rel", "limit")},
            "argmax_agreement": min(comparison.agreement for comparison in self.comparisons),
            "comparisons": [_finite(asdict(comparison)) for comparison in self.comparisons],
        }


def open_runner(
    name: str,
    bundle: Bundle,
    *,
    url: str | None = None,
    model: str = DEFAULT_MODEL,
    engine: Path | None = None,
    precision: Precision = "fp32",
) -> Runner:
    """A runner by the name that the command line gives it.

    url: of a Triton server; its protocol must be the one the name says.  engine: for the two TensorRTs.
    precision: of the graph that ONNX Runtime runs.
    Errors: InputError on an unknown name or what does not go together; whatever the runner raises.
    """
    if name not in RUNNERS:
        raise InputError(f"runner {name!r} is not known", hint=f"known: {', '.join(RUNNERS)}")
    if name in _DEFAULT_URLS:
        address = url or _DEFAULT_URLS[name]
        protocol = name.removeprefix("triton-")
        if not address.startswith(f"{protocol}://"):
            raise InputError(f"runner {name} speaks {protocol}, and {address} is no {protocol}:// address")
        return TritonRunner(bundle, address, model=model)
    if url is not None:
        raise InputError(f"runner {name} runs in this process; --url goes with triton-grpc and triton-http")
    if (engine is not None) != (name in FLAVORS):
        raise InputError(f"runner {name} {'needs --engine' if name in FLAVORS else 'takes no engine'}")
    if precision != "fp32" and name != "onnxruntime":
        raise InputError(f"runner {name} has the precision it was made with; --precision goes with onnxruntime")
    if engine is not None:
        opened = open_engine(engine)
        if opened.card.flavor != name:
            raise InputError(f"{engine}: it is an engine of {opened.card.flavor}, not {name}")
        return EngineRunner(bundle, opened)
    if name == "eager":
        return EagerRunner(bundle)
    return OnnxRuntimeRunner(bundle, variant=open_variant(bundle, precision))


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """1, 2, 3, an odd one in the middle and the largest, as far as the bundle goes."""
    odd = max_batch // 2 + 1 - (max_batch // 2) % 2
    return tuple(sorted({size for size in (1, 2, 3, odd, max_batch) if size <= max_batch}))


def check_parity(
    bundle: Bundle,
    runner: Runner,
    *,
    tolerance: Tolerance | None = None,
    on_done: Callable[[str], None] = lambda what: None,
) -> ParityResult:
    """Hold a runner to the golden logits and to eager PyTorch.

    tolerance: by default what a model of this float32 noise may differ by, in the runner's precision.
    on_done: told of each comparison that is finished.
    Errors: whatever the runner raises; a difference is no error but a result that did not pass.
    """
    allowed = tolerance or _tolerance(bundle, runner)
    sizes = [size for size in batch_sizes(runner.max_batch) if runner.takes(size)]
    comparisons = []

    def compare(reference: str, batch: int, found: NDArray[Any], wanted: NDArray[Any]) -> None:
        comparisons.append(_compared(reference, batch, found, wanted, allowed))
        on_done(f"{reference}, batch {batch}")

    inputs, golden = bundle.golden()
    for size in sizes:
        rows = np.resize(np.arange(len(inputs)), max(size, len(inputs)))
        found = [runner.run(inputs[rows[i : i + size]]) for i in range(0, len(rows) - size + 1, size)]
        compare("golden", size, np.concatenate(found), golden[rows[: len(found) * size]])
    generator = np.random.default_rng(_SEED)
    with EagerRunner(bundle) as eager:
        for size in sizes:
            fresh = _fresh(generator, bundle, size)
            compare("eager", size, runner.run(fresh), eager.run(fresh))
    return ParityResult(runner=runner.name, bundle_sha256=bundle.sha256, comparisons=tuple(comparisons))


def _tolerance(bundle: Bundle, runner: Runner) -> Tolerance:
    noise = bundle.manifest.float32_noise
    record = open_variant(bundle, runner.precision).record
    return precision_tolerance(noise, record.golden["largest_abs"]) if record else fp32_tolerance(noise)


def _fresh(generator: np.random.Generator, bundle: Bundle, size: int) -> NDArray[Any]:
    shape = (size, *bundle.input_shape)
    if bundle.manifest.input_kind == "pixels":
        return generator.integers(0, 256, shape, dtype=np.uint8)
    return generator.standard_normal(shape, dtype=np.float32)


def _compared(
    reference: str, batch: int, found: NDArray[Any], wanted: NDArray[Any], tolerance: Tolerance
) -> Comparison:
    comparable = found.shape == wanted.shape and bool(np.isfinite(found).all())
    largest = float(np.abs(found - wanted).max()) if comparable else float("nan")
    same = found.argmax(1) == wanted.argmax(1) if found.shape == wanted.shape else np.zeros(1)
    return Comparison(
        reference=reference,
        batch=batch,
        largest_abs=largest,
        largest_rel=largest / float(np.abs(wanted).max()),
        limit=tolerance.limit(wanted),
        agreement=float(same.mean()),
        passed=tolerance.accepts(found, wanted),
    )


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in values.items()}
