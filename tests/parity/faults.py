"""Bundles, servers and runners with a single fault each, as a bug would cause it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper, numpy_helper
from torch import nn

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.families.rmt.model import Stage
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.masks import ClosedFormGaussianMask
from gmmvit_deploy.models.scores.scales import LearnedTemperature
from gmmvit_deploy.models.scores.step import Constant
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner

ModelChange = Callable[[Model], None]


class Altered(OnnxRuntimeRunner):
    """ONNX Runtime with a fault in its answers."""

    def __init__(self, bundle: Bundle, change: Callable[[np.ndarray], np.ndarray], **options: Any) -> None:
        super().__init__(bundle, **options)
        self._change = change

    def _run(self, batch: np.ndarray) -> np.ndarray:
        return self._change(super()._run(batch))


def rebuilt(bundle: Bundle, out: Path, change: ModelChange, *, preprocessing: ImageSpec | None = None) -> Bundle:
    """Return a bundle whose graph was exported from a changed model; its hashes are correct."""
    model = model_from_bundle(bundle.manifest, bundle.weights_path)
    with torch.no_grad():
        change(model)
    inside = preprocessing or bundle.manifest.image
    graph = onnx_from_model(
        fold(model).model,
        preprocessing=inside if bundle.manifest.input_kind == "pixels" else None,
        max_batch=bundle.manifest.max_batch,
    )
    return with_graph(bundle, out, ir.to_proto(graph))


def with_file(bundle: Bundle, out: Path, name: str, content: bytes) -> Bundle:
    """Return a copy of the bundle with another content of a file, and its hash in the manifest."""
    shutil.copytree(bundle.path, out)
    (out / name).write_bytes(content)
    return with_manifest(out, lambda data: data["files"].update({name: sha256_of_bytes(content)}))


def with_graph(bundle: Bundle, out: Path, proto: onnx.ModelProto) -> Bundle:
    return with_file(bundle, out, "model.onnx", proto.SerializeToString())


def with_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> Bundle:
    manifest = path / "manifest.json"
    data = json.loads(manifest.read_text())
    change(data)
    manifest.write_text(json.dumps(data))
    return open_bundle(path)


def with_labels(bundle: Bundle, out: Path, labels: list[str]) -> Bundle:
    content = "".join(f"{label}\n" for label in labels).encode()
    shutil.copytree(bundle.path, out)
    (out / "labels.txt").write_bytes(content)
    files = {"labels.txt": sha256_of_bytes(content)}
    return with_manifest(out, lambda data: data.update(labels=labels, files={**data["files"], **files}))


def each_matrix(change: Callable[[torch.Tensor], torch.Tensor]) -> ModelChange:
    def apply(model: Model) -> None:
        for _, scores in attention_scores(model):
            for name, step in scores.steps():
                if step.role == "mask":
                    scores.put(name, Constant(change(step.matrix().detach()).contiguous(), like=step))

    return apply


def closed_form(model: Model) -> None:
    for _, scores in attention_scores(model):
        mask = scores.before.mask
        scores.before.mask = ClosedFormGaussianMask(mask.alpha.detach(), mask.sigma.detach(), mask.grid)


def scale_to_the_power(power: int) -> ModelChange:
    def apply(model: Model) -> None:
        for _, scores in attention_scores(model):
            scores.before.scale.factor **= power

    return apply


def class_row_masked(matrix: torch.Tensor) -> torch.Tensor:
    masked = matrix.clone()
    masked[..., 0, 1:] = 0
    return masked


def without_shift_mask(model: Model) -> None:
    for _, scores in attention_scores(model):
        bias = scores.before.bias
        table = bias.table.detach()[bias.index.flatten()].reshape(*bias.index.shape, -1).permute(2, 0, 1)
        scores.before.bias = Constant(table.contiguous(), like=bias)


def mixing_transposed(place: str) -> ModelChange:
    """place: ``before`` or ``after`` softmax."""

    def apply(model: Model) -> None:
        for _, scores in attention_scores(model):
            for name, step in scores.steps():
                if step.operation == "mix" and name.startswith(f"{place}."):
                    step.weight.data = step.weight.detach().t().contiguous()

    return apply


def temperatures_inverted(model: Model) -> None:
    for _, scores in attention_scores(model):
        for _, step in scores.steps():
            if isinstance(step, LearnedTemperature):
                stored = step.temperature.detach()
                step.temperature.data = -stored if step.is_logarithm else 1 / stored


def without_rotation(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, Stage):
            module.rotation = None


def usual_mistake(name: str) -> ModelChange:
    """Return the change that makes a mistake of the model's family."""

    def apply(model: Model) -> None:
        assert dict(family_of(model.spec).network().mistakes)[name](model)

    return apply


def set_on(kind: type[nn.Module], name: str, value: object) -> ModelChange:
    def apply(model: Model) -> None:
        for module in model.modules():
            if isinstance(module, kind):
                setattr(module, name, value)

    return apply


def channels_reversed(bundle: Bundle, out: Path) -> Bundle:
    """The graph takes BGR."""
    proto = onnx.load(bundle.onnx_path)
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            if name == "pixels" and node.op_type != "Shape":
                node.input[index] = "pixels.reversed"
    order = numpy_helper.from_array(np.array([2, 1, 0], np.int64), "pixels.order")
    proto.graph.initializer.append(order)
    gather = helper.make_node("Gather", ["pixels", "pixels.order"], ["pixels.reversed"], name="model/Gather", axis=3)
    nodes = [gather, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return with_graph(bundle, out, proto)
