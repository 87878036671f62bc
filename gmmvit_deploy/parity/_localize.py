"""Localise an error: compare the output of every block with the output of the same block in float64 PyTorch.

The runner's graph, with this project's CPU kernels if the runner uses these kernels, runs twice: unchanged, and with
the outputs of the blocks as additional outputs of the graph. Additional outputs can keep a runtime from fusing
operators across blocks. The check therefore reports the difference between the logits of the two runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gmmvit_deploy.inference.precision import QUANTIZED, Precision
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.parity._runner_check import RunnerCheck
from gmmvit_deploy.parity._verdict import Check, passed_unless
from gmmvit_deploy.parity.measures import ErrorMeasure
from gmmvit_deploy.progress import Progress
from gmmvit_deploy.runtimes.runners.inspection import LOGITS
from gmmvit_deploy.tolerances import limit_from_noise

if TYPE_CHECKING:
    import onnx_ir as ir


class LocalizeCheck(RunnerCheck):
    """In place of an engine or a server, which cannot be inspected, the bundle's graph runs in ONNX Runtime."""

    name = "localize"

    def judge(self) -> Check:
        reference, runner, inputs = self.run.reference, self.runner, self.run.sent.batch.inputs
        if reference is None:
            return self.not_judged(self.run.needs_model)
        if not self.run.options.localize:
            return self.not_judged("not requested; add --localize")
        self.tested.on_progress(Progress("block by block"))
        graph, why_not = runner.inspectable()
        if graph is None:
            return self.not_judged(why_not)
        precision = runner.precision
        # The graph has no mask without influence on the logits, so the tokens that the network does not read differ.
        dead = reference.dead_attentions
        blocks_of_model = family_of(reference.model.spec).blocks(reference.model.spec)
        names = tuple(name for name in blocks_of_model if not any(a.startswith(f"{name}.") for a in dead))
        if not names:
            return self.not_judged("gmmvit does not know the blocks of this model")
        tensors = last_tensors(graph.model.graph, names)
        values = graph.values(inputs, [*tensors.values()])
        untouched = graph.values(inputs, [])[LOGITS]
        trained = _outputs(reference.model, names, reference.tensors(inputs))
        exact = _outputs(reference.exact, names, reference.tensors(inputs).double())
        if reference.model.foreign:
            trained, exact = (_as_narrow_as(values, tensors, outputs) for outputs in (trained, exact))
        tensors[LOGITS] = LOGITS
        blocks = _errors(tensors, values, trained, exact, precision)
        first = next((block for block in blocks if not block["passed"]), None)
        of = f"{why_not}, so {graph.name} ran in ONNX Runtime: " if why_not else ""
        reasons = []
        if first is not None:
            name, largest = first["block"], f"{first['largest']:.3g}"
            summary = (
                f"{of}the first block out of tolerance is {name}: its error is {largest}, expected at most "
                f"{first['limit']:.3g}"
            )
            reasons.append(f"{name}: its output differs by up to {largest} from PyTorch's float64 output")
        elif blocks[-1]["limit"] is None:
            steepest = max(blocks, key=lambda block: block["growth"])["block"]
            summary = f"{of}{precision} has no tolerance for single blocks; the error grows most at {steepest}"
        else:
            summary = f"{of}all {len(blocks)} blocks are within tolerance"
        details = {
            "graph": graph.name,
            "first": first["block"] if first else None,
            "looking_changed_logits_by": float(np.abs(values[LOGITS] - untouched).max()),
            "blocks": blocks,
        }
        return passed_unless(reasons, self.name, summary, **details)


def last_tensors(graph: ir.Graph, names: Iterable[str]) -> dict[str, str]:
    """Map the name of each block to the output of its last node in the graph."""
    last: dict[str, str] = {}
    for node in graph:
        module = str(node.name).partition("/")[0]
        for name in names:
            if module == name or module.startswith(f"{name}."):
                last[name] = str(node.outputs[0].name)
    return {name: last[name] for name in names if name in last}


def _outputs(model: Model, names: Iterable[str], tensors: torch.Tensor) -> dict[str, NDArray[Any]]:
    caught: dict[str, NDArray[Any]] = {}

    def catch(name: str) -> Any:
        return lambda module, given, output: caught.update({name: output.numpy()})

    hooks = [model.get_submodule(name).register_forward_hook(catch(name)) for name in names]
    try:
        with torch.inference_mode():
            caught[LOGITS] = model(tensors).numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def _as_narrow_as(
    values: Mapping[str, NDArray[Any]], tensors: Mapping[str, str], outputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Drop tokens that the graph does not compute: of foreign networks, the last block may output those of the head."""
    narrowed = dict(outputs)
    for name, tensor in tensors.items():
        whole, value = outputs[name], values.get(tensor)
        if value is not None and whole.ndim == 3 and value.size < whole.size:
            narrowed[name] = whole[:, : value.size // (whole.shape[0] * whole.shape[2])]
    return narrowed


def _errors(
    tensors: dict[str, str],
    values: Mapping[str, NDArray[Any]],
    trained: dict[str, NDArray[Any]],
    exact: dict[str, NDArray[Any]],
    precision: Precision,
) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    before = 0.0
    for name, tensor in tensors.items():
        if tensor not in values or values[tensor].size != exact[name].size:
            continue  # an optimised graph may have no tensor that equals this block's output
        noise, error = ErrorMeasure(), ErrorMeasure()
        noise.add(trained[name], exact[name])
        error.add(values[tensor].reshape(exact[name].shape), exact[name])
        errors = error.errors()
        limit = limit_from_noise(noise.noise(), precision) if precision not in QUANTIZED else None
        within = limit is None or (
            not errors.broken and errors.largest <= limit.largest and errors.rms <= (limit.rms or np.inf)
        )
        blocks.append(
            {
                "block": name,
                "largest": errors.largest,
                "relative_l2": errors.relative_l2,
                "growth": errors.relative_l2 / before if before else 1.0,
                "limit": limit.largest if limit else None,
                "passed": within,
            }
        )
        before = errors.relative_l2
    return blocks
