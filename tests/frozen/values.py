"""Values that must not change when the code is rearranged, for each golden checkpoint, precision and engine form.

    logits      SHA-256 of PyTorch's float32 logits on the stored inputs
    graphs      precision and form → hash of the exported graph, with its weights and without them, and its roles
    mistakes    usual mistake → SHA-256 of the logits it gives, and the name under which parity reports these logits
    inspect     what ``gmmvit inspect --json`` prints, without paths
    engines     precision and form → layers of the engine that tensorrt-rtx builds, and what its card proves

A graph's hash is a Merkle hash from its outputs to its inputs: names, the order of nodes, node metadata and duplicated
constants do not change it; operators, attributes, wiring and values do. The bits of weights and logits depend on the
machine (torch computes exp and pow by the processor's vector extensions), so `machine` goes with them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.report import describe_checkpoint
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.export.variants import graph_from_model
from gmmvit_deploy.graphs.quantize import QUANTIZED
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.models.specs import input_shape
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.suspects import explain, suspects
from gmmvit_deploy.precision import PRECISIONS, Precision
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_onnx
from gmmvit_deploy.runtimes.engines.flavors import find_flavor
from gmmvit_deploy.runtimes.engines.options import BuildOptions
from gmmvit_deploy.runtimes.engines.proof import Layer, layers_from_text
from tests.conftest import RELEASED, Golden, golden

__all__ = [
    "FORMS",
    "STORED",
    "MerkleHashes",
    "engine_of",
    "form_name",
    "frozen_parts",
    "graph_from_golden",
    "graph_hashes",
    "inspected",
    "logits_hash",
    "machine",
    "mistakes",
]

STORED = Path(__file__).with_name("values.json")
FORMS: tuple[tuple[Precision, bool], ...] = tuple(
    (precision, padded) for precision in PRECISIONS for padded in (True, False) if padded or precision != "fp32"
)
"""(precision, heads padded for engines): float32 has no engine form of its own."""
_MAX_BATCH = 8
_EXPLAINED_WITHIN = 1e-6


def form_name(precision: Precision, padded: bool) -> str:
    return precision if padded else f"{precision}, heads not padded"


def machine() -> dict[str, Any]:
    """Return the properties of the machine on which the bits of weights and logits depend."""
    features = sorted(set(cpu_features()) & {"avx2", "avx512f", "avx512_bf16", "amx_tile"})
    return {"torch": torch.__version__.partition("+")[0], "features": features}


def sha256_of_array(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


# ---- graphs ------------------------------------------------------------------------------------------------------


def graph_from_golden(checkpoint: Golden, precision: Precision, padded: bool) -> onnx.ModelProto:
    """Return the graph of a golden checkpoint in a precision and form; calibration batches are random and fixed."""
    loaded = load_checkpoint(checkpoint.path, checkpoint.hints)
    generator = np.random.default_rng(7)
    shape = (8, *input_shape(loaded.spec))
    batches = [generator.standard_normal(shape, dtype=np.float32) for _ in range(2)]
    return graph_from_model(
        loaded.model,
        precision,
        preprocessing=None,
        max_batch=_MAX_BATCH,
        calibration=batches if precision in QUANTIZED else None,
        padded=padded,
    ).proto


class MerkleHashes:
    """Hash of every value of a graph, from the nodes and constants that compute it.

    weights: whether the values of floating-point constants count, or their types and shapes alone.
    """

    def __init__(self, proto: onnx.ModelProto, *, weights: bool) -> None:
        self._weights = weights
        self._known = {value.name: _digest(["input", str(value.type)]) for value in proto.graph.input}
        self._known |= {value.name: self._constant(value) for value in proto.graph.initializer}
        for node in proto.graph.node:  # an ONNX graph is in topological order
            whole = self.of_node(node)
            self._known |= {name: _digest([whole, str(index)]) for index, name in enumerate(node.output)}

    def __getitem__(self, name: str) -> str:
        return self._known[name] if name else ""

    def of_node(self, node: onnx.NodeProto) -> str:
        attributes = sorted(self._attribute(attribute) for attribute in node.attribute)
        return _digest([node.domain, node.op_type, *attributes, *(self[name] for name in node.input)])

    def _attribute(self, attribute: onnx.AttributeProto) -> str:
        if attribute.type == onnx.AttributeProto.TENSOR:
            return f"{attribute.name}={self._constant(attribute.t)}"
        return f"{attribute.name}={onnx.helper.get_attribute_value(attribute)!r}"

    def _constant(self, tensor: onnx.TensorProto) -> str:
        values = numpy_helper.to_array(tensor)
        counts = self._weights or tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
        content = sha256_of_array(values) if counts else ""
        return _digest(["constant", str(tensor.data_type), str(tuple(tensor.dims)), content])


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def graph_hashes(proto: onnx.ModelProto) -> dict[str, Any]:
    """Return both hashes, the number of nodes, and the roles of the nodes."""
    structure = MerkleHashes(proto, weights=False)
    whole = MerkleHashes(proto, weights=True)
    roles = roles_of(proto.graph)
    by_node = sorted(f"{structure.of_node(node)} {roles[node.name]}" for node in proto.graph.node)
    return {
        "opset": {entry.domain: entry.version for entry in proto.opset_import if entry.domain == ""}[""],
        "nodes": len(proto.graph.node),
        "structure": _digest([structure[entry.name] for entry in proto.graph.output]),
        "whole": _digest([whole[entry.name] for entry in proto.graph.output]),
        "roles": dict(sorted(Counter(roles.values()).items())),
        "roles_by_node": _digest(by_node),
    }


# ---- models ------------------------------------------------------------------------------------------------------


def logits_hash(checkpoint: Golden) -> str:
    """Return the hash of eager PyTorch's logits on a single thread: more threads split sums elsewhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = load_checkpoint(checkpoint.path, checkpoint.hints).model
        with torch.inference_mode():
            return sha256_of_array(model(torch.from_numpy(checkpoint.inputs)).numpy())
    finally:
        torch.set_num_threads(threads)


def mistakes(bundle: Bundle) -> dict[str, dict[str, str]]:
    """Return usual mistake → hash of its logits on the golden inputs, and the name that parity reports for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reference = Reference(bundle)
        inputs, _ = bundle.golden()
        given = dict(suspects(bundle, reference, inputs))
        return {
            name: {
                "logits": sha256_of_array(logits),
                "named": explain(bundle, reference, inputs, logits, _EXPLAINED_WITHIN, mistakes=given.items()),
            }
            for name, logits in given.items()
        }
    finally:
        torch.set_num_threads(threads)


def inspected(checkpoint: Golden) -> dict[str, Any]:
    described = describe_checkpoint(load_checkpoint(checkpoint.path, checkpoint.hints))
    described["checkpoint"].pop("path")
    return json.loads(json.dumps(described))  # type: ignore[no-any-return]


# ---- engines -----------------------------------------------------------------------------------------------------


def engine_of(proto: onnx.ModelProto, precision: Precision, folder: Path) -> dict[str, Any]:
    """Build a graph with tensorrt-rtx for compute capability 8.9, without a GPU, and return the engine's contents."""
    path = folder / "graph.onnx"
    onnx.save(proto, path)
    options = BuildOptions(precision=precision, capabilities=("8.9",))
    engine = engine_from_onnx(path, options, find_flavor("tensorrt-rtx"), out=folder / "engine", force=True)
    layers = layers_from_text((folder / "engine" / "layers.txt").read_text())
    return {
        "layers": len(layers),
        "listing": _digest([_described(layer) for layer in layers]),
        "attentions": [
            {"name": proof.name, "fused": proof.fused, "precision": proof.precision, "kernels": len(proof.kernels)}
            for proof in engine.card.attentions
        ],
        "misses": len(engine.card.misses),
    }


def _described(layer: Layer) -> str:
    """Return a layer without the names of the builder and our modules: its kind, types and operators."""
    operators = Counter(name.rpartition("/")[2].partition(".")[0] for name in layer.nodes)
    return f"{layer.kind} {layer.profile} {layer.reads} {layer.writes} {sorted(operators.items())}"


# ---- writing -----------------------------------------------------------------------------------------------------


def frozen_parts(name: str) -> Iterator[tuple[str, Any]]:
    """Yield every frozen value of a golden checkpoint, part by part."""
    checkpoint = golden(name)
    yield "logits", logits_hash(checkpoint)
    yield "inspect", inspected(checkpoint)
    protos = {form: graph_from_golden(checkpoint, *form) for form in FORMS}
    graphs = {form: graph_hashes(proto) for form, proto in protos.items()}
    yield "graphs", {form_name(*form): hashes for form, hashes in graphs.items()}
    with tempfile.TemporaryDirectory() as folder:
        options = ExportOptions(input_kind="tensor", max_batch=_MAX_BATCH)
        bundle = bundle_from_checkpoint(checkpoint.path, Path(folder) / "b", options, hints=checkpoint.hints)
        yield "mistakes", mistakes(bundle)
        built: dict[str, dict[str, Any]] = {}  # forms with equal graphs have equal engines
        for form, hashes in graphs.items():
            if hashes["whole"] not in built:
                built[hashes["whole"]] = engine_of(protos[form], form[0], Path(folder))
        yield "engines", {form_name(*form): built[hashes["whole"]] for form, hashes in graphs.items()}


def main() -> None:
    """``python -m tests.frozen.values OUT [NAME ...]``: compute the values and write them as JSON."""
    out, names = Path(sys.argv[1]), sys.argv[2:] or RELEASED
    values: dict[str, Any] = {"machine": machine()}
    for name in names:
        values[name] = {}
        for part, value in frozen_parts(name):
            values[name][part] = value
            print(name, part, flush=True)
        out.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
