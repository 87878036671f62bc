"""Where does it drift?  The output of every block, against the same block of float64 PyTorch.

The graph is run once more with the blocks' outputs made outputs of the graph. That can keep a
runtime from fusing across them, so the logits of this second run are compared with those of the
graph as it is, and the difference is told: what was looked at is not more changed than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.graphs.emulate import without_bfloat16
from gmmvit_deploy.models.build import Model
from gmmvit_deploy.parity.measures import ErrorMeasure
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.eager import EagerRunner
from gmmvit_deploy.runtime.onnxruntime import session_from_bytes
from gmmvit_deploy.runtime.openvino import graph_precision
from gmmvit_deploy.runtime.runner import Runner
from gmmvit_deploy.scores.attention import attention_scores
from gmmvit_deploy.tolerances import UNIT_ROUNDOFFS, limit_from_noise
from gmmvit_deploy.variants import open_variant

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["blocks_of", "localize"]

NAME = "localize"
_LOGITS = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockError:
    """limit: None where the precision gives none.  growth: relative L2 over that of the block before."""

    block: str
    largest: float
    relative_l2: float
    growth: float
    limit: float | None
    passed: bool


def localize(bundle: Bundle, reference: Reference, runner: Runner, inputs: NDArray[Any]) -> Check:
    """Name the first block of the runner's graph whose output leaves the tolerance.

    For a runner whose insides cannot be read, an engine or a server, this is the bundle's graph of
    its precision in ONNX Runtime.
    Errors: BundleError when ONNX Runtime cannot run the graph.
    """
    if isinstance(runner, EagerRunner):
        why = f"{runner.name} runs the trained module, not the bundle's graph"
        return Check(name=NAME, verdict="skipped", says=why, reasons=(why,))
    if runner.name == "openvino" and runner.precision != graph_precision(runner.precision):
        why = f"OpenVINO rounds to {runner.precision} inside its kernels: no graph shows where"
        return Check(name=NAME, verdict="skipped", says=why, reasons=(why,))
    precision = runner.precision
    proto = onnx.load(open_variant(bundle, precision).path)
    names = blocks_of(reference.model)
    tapped, tensors = _tapped(proto, names)
    found = _run(tapped, inputs, [*tensors.values(), _LOGITS])
    untouched = _run(proto, inputs, [_LOGITS])[_LOGITS]
    trained = _outputs(reference.model, names, reference.tensors(inputs))
    exact = _outputs(reference.exact, names, reference.tensors(inputs).double())
    tensors[_LOGITS] = _LOGITS
    blocks = _errors(tensors, found, trained, exact, precision)
    moved = float(np.abs(found[_LOGITS] - untouched).max())
    first = next((block for block in blocks if not block.passed), None)
    steepest = max(blocks, key=lambda block: block.growth)
    of = (
        ""
        if runner.name == "onnxruntime"
        else f"{runner.name} cannot be looked into; the bundle's graph in ONNX Runtime: "
    )
    if first is not None:
        says = (
            f"{of}the first block out of tolerance is {first.block}: {first.largest:.3g}, {first.limit:.3g} is allowed"
        )
    elif blocks[-1].limit is None:
        says = f"{of}{precision} has no tolerance by block; the error grows most at {steepest.block}"
    else:
        says = f"{of}all {len(blocks)} blocks are within tolerance"
    return Check(
        name=NAME,
        verdict="failed" if first else "passed",
        says=says,
        reasons=(f"{first.block}: its output is {first.largest:.3g} from the truth",) if first else (),
        details={
            "graph": open_variant(bundle, precision).path.name,
            "first": first.block if first else None,
            "looking_changed_logits_by": moved,
            "blocks": [asdict(block) for block in blocks],
        },
    )


def blocks_of(model: Model) -> list[str]:
    """Names of the modules between which a drift is looked for, in the order in which they run."""
    attentions = [f"{name}.scores" for name, _ in attention_scores(model)]
    chosen: list[str] = []
    for name, module in model.named_modules():
        holds = sum(attention.startswith(f"{name}.") for attention in attentions)
        between = name.endswith(("patch_embedding", ".merge")) or name.rpartition(".")[0] == "poolings"
        inside = any(name.startswith(f"{one}.") for one in chosen)
        if name and not inside and not isinstance(module, nn.ModuleList) and (holds == 1 or between):
            chosen.append(name)
    return chosen


def _tapped(proto: ModelProto, names: Iterable[str]) -> tuple[ModelProto, dict[str, str]]:
    """A copy with the blocks' last tensors as outputs, and block → tensor."""
    last: dict[str, str] = {}
    for node in proto.graph.node:
        module = node.name.partition("/")[0]
        for name in names:
            if module == name or module.startswith(f"{name}."):
                last[name] = node.output[0]
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    present = {output.name for output in copy.graph.output}
    for tensor in sorted(set(last.values()) - present):
        copy.graph.output.append(onnx.ValueInfoProto(name=tensor))
    # Their types are the runtime's to infer; a checker would want them written.
    inferred = {one.name: one for one in onnx.shape_inference.infer_shapes(proto).graph.value_info}
    for output in copy.graph.output:
        if output.name in inferred:
            output.CopyFrom(inferred[output.name])
    return copy, {name: last[name] for name in names if name in last}


def _run(proto: ModelProto, inputs: NDArray[Any], outputs: list[str]) -> dict[str, NDArray[Any]]:
    session = session_from_bytes(without_bfloat16(proto).SerializeToString(), "the graph with its blocks as outputs")
    (image,) = (one.name for one in proto.graph.input)
    try:
        return dict(zip(outputs, session.run(outputs, {image: inputs}), strict=True))
    # ONNX Runtime raises classes of its own for whatever goes wrong inside.
    except Exception as exc:
        raise BundleError(f"the graph cannot be run with its blocks as outputs: {exc}") from exc


def _outputs(model: Model, names: Iterable[str], tensors: torch.Tensor) -> dict[str, NDArray[Any]]:
    """Output of each named module, and the logits."""
    caught: dict[str, NDArray[Any]] = {}

    def catch(name: str) -> Any:
        return lambda module, given, output: caught.update({name: output.numpy()})

    hooks = [model.get_submodule(name).register_forward_hook(catch(name)) for name in names]
    try:
        with torch.inference_mode():
            caught[_LOGITS] = model(tensors).numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def _errors(
    tensors: dict[str, str],
    found: dict[str, NDArray[Any]],
    trained: dict[str, NDArray[Any]],
    exact: dict[str, NDArray[Any]],
    precision: Precision,
) -> list[BlockError]:
    blocks: list[BlockError] = []
    before = 0.0
    for name, tensor in tensors.items():
        if found[tensor].size != exact[name].size:
            continue  # a graph in another form may have no tensor that is this block's output
        noise, error = ErrorMeasure(), ErrorMeasure()
        noise.add(trained[name], exact[name])
        error.add(found[tensor].reshape(exact[name].shape), exact[name])
        errors = error.errors()
        limit = limit_from_noise(noise.noise(), precision) if precision in UNIT_ROUNDOFFS else None
        within = limit is None or (
            not errors.broken and errors.largest <= limit.largest and errors.rms <= (limit.rms or np.inf)
        )
        blocks.append(
            BlockError(
                block=name,
                largest=errors.largest,
                relative_l2=errors.relative_l2,
                growth=errors.relative_l2 / before if before else 1.0,
                limit=limit.largest if limit else None,
                passed=within,
            )
        )
        before = errors.relative_l2
    return blocks
