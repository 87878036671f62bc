"""Run a graph of the bundle in OpenVINO on the CPU, unchanged or with this project's CPU kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError, RunnerUnavailableError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram, UnusedKernelsError
from gmmvit_deploy.inference.precision import OPENVINO_PRECISIONS, SPECS, Precision
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.programs.openvino import has_bf16, our_kernels, read_graph
from gmmvit_deploy.runtimes.runners.inspection import LOGITS
from gmmvit_deploy.runtimes.runners.runner import InspectableGraph, Inspection, Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import Variant


class OpenVinoRunner(Runner):
    """Runs ``model.onnx`` of a bundle in float32 or bf16, or the bundle's int8 graph."""

    name = "openvino"
    runtime = "OpenVINO"
    graph: Variant

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        *,
        precision: Precision = "fp32",
        threads: int = 0,
        kernels: bool = False,
        read: Callable[[Path], Any] = read_graph,
    ) -> None:
        """Load and compile a graph.

        variant: the int8 graph for CPUs for int8, the float32 graph for fp32 and bf16.
        threads: 0 uses a thread per core.
        read: `read_graph`, or a function with its errors; runners of the same file can share what it read.
        Errors: RunnerUnavailableError when OpenVINO or this CPU does not support the precision, or when our kernels are
        asked for and not available.  BundleError when OpenVINO cannot load the graph.
        MissingDependencyError when OpenVINO is not installed.
        """
        super().__init__(bundle)
        if precision not in OPENVINO_PRECISIONS:
            raise RunnerUnavailableError(
                f"runner openvino computes in {', '.join(OPENVINO_PRECISIONS)} on a CPU, not in {precision}"
            )
        openvino = require("openvino", package="openvino", extra="openvino")
        if SPECS[precision].openvino == "bf16" and not has_bf16():
            raise RunnerUnavailableError(
                "runner openvino: this CPU has no bf16", hint="choose fp32 or int8, which run on every x86 CPU"
            )
        self.precision = precision
        self.graph = variant
        self.form = variant.form
        self.version = str(openvino.__version__)
        ours = None
        if kernels:
            self.name = "openvino+kernels"
            ours, why = our_kernels(precision)
            if ours is None:
                raise self._without_kernels(why)
        self._arithmetic = ours.arithmetic if ours else ""
        self._instruction_set = ours.instruction_set if ours else ""
        try:
            self.program = OpenVinoProgram(
                read(variant.path), hint=SPECS[precision].openvino, threads=threads, kernels=ours
            )
        except UnusedKernelsError as exc:
            raise self._without_kernels(str(exc)) from exc
        except RuntimeError as exc:
            raise BundleError(f"{variant.path}: OpenVINO {self.version} cannot load the graph: {exc}") from exc

    def _without_kernels(self, why: str) -> RunnerUnavailableError:
        return RunnerUnavailableError(
            f"runner {self.label} cannot run here: {why}",
            hint="type --runner openvino to run the same graph with OpenVINO's operators, without this project's "
            "kernels",
        )

    @property
    def settings(self) -> dict[str, str]:
        program = self.program
        settings = {
            "threads": str(program.threads),
            "rows at once": str(program.chunk),
            "hint": SPECS[self.precision].openvino,
            "attention": f"our own, {self._arithmetic}" if program.fused_attentions else "OpenVINO's",
        }
        if program.attentions:
            settings["attentions in our kernel"] = program.attentions
        if self._instruction_set:
            settings["instruction set of our kernel"] = self._instruction_set
        if program.fused_norms:
            settings["norms"] = "our own" if program.fused_products else "our own, except for a single row"
        if program.fused_products:
            settings["int8 products"] = f"our own for fewer than {program.few_rows} images"
        return settings

    def _program_provenance(self) -> dict[str, str]:
        compiled = ", ".join(f"{count} {kernel}" for kernel, count in self.program.kernels.items())
        return {**self._graph_provenance(), "OpenVINO": self.version, "kernels": compiled}

    def _graph_provenance(self) -> dict[str, str]:
        file = self.graph.path.name
        library = openvino_library()[0] if self._arithmetic else None
        if library is None:
            return {"graph": file, "graph SHA-256": self.graph.sha256}
        program = self.program
        return {
            "graph": f"{file} with our kernels",
            "graph SHA-256": sha256_of_model(program.model(1, shared=True), program.model(program.chunk)),
            "made from": file,
            "made from SHA-256": self.graph.sha256,
            "kernels SHA-256": sha256_of_file(library),
        }

    def inspectable(self) -> Inspection:
        """Return the OpenVINO model that computes the chunks of a large batch, with our kernels if they are used."""
        import onnx_ir as ir

        ours = " with our kernels" if self._arithmetic else ""
        name = f"{self.graph.path.name}{ours} in OpenVINO"
        # OpenVINO keeps the tensor names of the ONNX file. The nodes of the file give the module of each tensor.
        return Inspection(InspectableGraph(name=name, model=ir.load(self.graph.path), values=self._values), "")

    def _values(self, inputs: NDArray[Any], tensors: Sequence[str]) -> dict[str, NDArray[Any]]:
        import openvino

        model = self.program.model(self.program.chunk).clone()
        there = {name for node in model.get_ordered_ops() for value in node.outputs() for name in value.names}
        logits = next(iter(model.outputs[0].names))
        kept = sorted(set(tensors) & there - {logits})
        if kept:
            model.add_outputs(kept)
        settings = {
            "INFERENCE_PRECISION_HINT": SPECS[self.precision].openvino,
            "INFERENCE_NUM_THREADS": str(self.program.threads),
            **self.program.quantization,
        }
        request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        request.infer({0: inputs})
        values = {name: request.get_tensor(name).data.copy() for name in kept}
        return {**values, LOGITS: request.get_tensor(logits).data.copy()}

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self.program.run(batch)
        return logits

    def _run_all(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        return self.program.answers(batch)


def sha256_of_model(*models: Any) -> str:
    """Return the SHA-256 of OpenVINO models: kind, attributes, types, shapes, inputs and constant of each operation.

    The hash leaves out the names of operations, because the numbers in these names differ between processes.
    """
    import numpy as np

    digest = hashlib.sha256()
    for model in models:
        places: dict[str, int] = {}
        for place, node in enumerate(model.get_ordered_ops()):
            places[node.get_name()] = place
            sources = [value.get_source_output() for value in node.inputs()]
            described = (
                node.get_type_name(),
                sorted((name, str(value)) for name, value in node.get_attributes().items()),
                [(places[source.get_node().get_name()], source.get_index()) for source in sources],
                [f"{value.get_element_type()} {value.get_partial_shape()}" for value in node.outputs()],
            )
            digest.update(repr(described).encode())
            if node.get_type_name() == "Constant":
                digest.update(np.ascontiguousarray(node.data).tobytes())
    return digest.hexdigest()
