"""Export a folded model, which stores each mask as a constant, to an ONNX graph."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, cast

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from gmmvit_deploy.errors import ExportError, InputError
from gmmvit_deploy.exporting._declared_roles import declare_roles, name_nodes
from gmmvit_deploy.exporting._numeric_proof import DYNAMIC_BATCH_HINT
from gmmvit_deploy.graphs.declared import ATTENTION_KEY, ROLE_KEY
from gmmvit_deploy.graphs.exported import fold_constants, optimize_exactly, remove_no_ops
from gmmvit_deploy.graphs.stacked_qkv import split_stacked_projections
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import input_shape

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

OPSET = 20  # the first opset with Gelu; LayerNormalization exists since opset 17
_GRAPHS = ("def forward(", "class GraphModule")
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in forward\n(.*)')


class PixelInput(nn.Module):
    """Scale and normalise uint8 pixels (B, height, width, channels), then compute the outputs of the model.

        x = (pixels / 255 − mean) / std

    Training normalises the images with torchvision's ToTensor and Normalize. Because the order of operations is the
    same, x equals the result of training bit for bit.
    """

    mean: Tensor
    std: Tensor
    operator_roles: ClassVar[Mapping[str, Role]] = dict.fromkeys(("_to_copy", "to", "div", "sub"), "input")

    def __init__(self, model: Model, image: ImageSpec) -> None:
        """Wrap a model.  Errors: InputError when ``image`` has no mean and std."""
        super().__init__()
        if image.normalisation is None:
            raise InputError(
                "the mean and std are missing; a graph that takes pixels needs them to normalise the images"
            )
        mean, std = image.normalisation
        self.model = model
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, pixels: UInt8[Tensor, "batch height width channels"]) -> Tensor | tuple[Tensor, ...]:
        images = (pixels.to(torch.float32) / 255.0 - self.mean) / self.std
        answers: Tensor | tuple[Tensor, ...] = self.model(images.permute(0, 3, 1, 2))
        return answers


def onnx_from_model(model: Model, *, preprocessing: ImageSpec | None, max_batch: int) -> ir.Model:
    """Export a folded model to an ONNX graph with the outputs of the model (float32) and a dynamic batch B.

    preprocessing: with an `ImageSpec`, the input of the graph is ``pixels`` (uint8, B × height × width × channels), and
    the graph normalises the pixels. With None, the input is ``tensor`` (float32, B × channels × height × width).
    max_batch: the largest batch.
    Errors:
        ExportError: the exporter fails, the batch of the graph is fixed, or `declare_roles` refuses the graph.
        InputError: ``preprocessing`` has no mean and std.
    """
    if preprocessing is None:
        module: nn.Module = model
        name, example = "tensor", torch.zeros(2, *input_shape(model.spec))
    else:
        module = PixelInput(model, preprocessing).eval()
        name, example = "pixels", torch.zeros(2, *preprocessing.pixels_shape, dtype=torch.uint8)
    # torch.export treats a dimension as dynamic only if its range has at least two values.
    batch = torch.export.Dim("batch", min=1, max=max(2, max_batch))
    model.returns_all = len(model.outputs) > 1
    try:
        with quiet_exporter():
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=[name],
                output_names=[*model.outputs],
                dynamic_shapes=({0: batch},),
                custom_translation_table={torch.ops.aten._adaptive_avg_pool2d.default: _adaptive_pooling},
                optimize=not model.foreign,  # `optimize_exactly` keeps small scalars
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as exc:
        reason = _reason_of_exporter(exc)
        raise ExportError(f"the ONNX exporter of torch {torch.__version__} failed: {reason}") from exc
    finally:
        model.returns_all = False
    if program is None:
        raise ExportError(f"the ONNX exporter of torch {torch.__version__} returned no graph")
    graph = program.model
    if model.foreign:
        with quiet_exporter():
            optimize_exactly(graph)
            fold_constants(graph)
        remove_no_ops(graph)
    require_dynamic_batch(graph)
    name_nodes(graph)
    declare_roles(graph, module, foreign=model.foreign)
    split_stacked_projections(graph)
    _strip_traces(graph)
    return graph


def _adaptive_pooling(x: Any, output_size: Sequence[int]) -> Any:
    """Translate PyTorch's adaptive average pooling, for which ONNX has no operator.

        images (B, C, H, W) of a multiple of the output's size     AveragePool
        other sizes, and single images (C, H, W)                   y = R x Cᵀ

    Row i of the constant matrices R and C computes the mean of window i, from ⌊i · size / output⌋ to
    ⌈(i + 1) · size / output⌉, exclusively. PyTorch's exporter gathers the values of each window; OpenVINO 2026.4
    computes some of these graphs wrongly.
    """
    import onnx_ir as ir
    import onnxscript

    op: Any = onnxscript.opset20  # typed for tensors; the exporter passes values of the graph
    sizes = [(int(size), output) for size, output in zip(x.shape[-2:], output_size, strict=True)]
    if len(x.shape) == 4 and all(size % output == 0 for size, output in sizes):
        window = [size // output for size, output in sizes]
        return op.AveragePool(x, kernel_shape=window, strides=window)
    rows, columns = (_means_of_windows(*pair) for pair in sizes)
    left, right = (op.Constant(value=ir.tensor(matrix)) for matrix in (rows, columns.T.copy()))
    return op.MatMul(op.MatMul(left, x), right)


def _means_of_windows(size: int, output: int) -> NDArray[np.float32]:
    matrix = np.zeros((output, size), np.float32)
    for index in range(output):
        start, end = index * size // output, -((index + 1) * size // -output)
        matrix[index, start:end] = 1 / (end - start)
    return matrix


def _strip_traces(model: ir.Model) -> None:
    """Remove the exporter's metadata, which contains paths on this machine and differs between runs of the exporter."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for metadata in (model.metadata_props, graph.metadata_props, *(value.metadata_props for value in values)):
        metadata.clear()
    for node in graph:
        for key in node.metadata_props.keys() - {ROLE_KEY, ATTENTION_KEY}:
            del node.metadata_props[key]
        node.doc_string = None


def require_dynamic_batch(model: ir.Model) -> None:
    """Check that the first dimension of each input and output of the graph has a name and no fixed size.

    The exporter traces a model with two images, and the batch of some models comes out fixed at 2.
    Errors: ExportError that names an input or output with a fixed batch, or whose batches have different names.
    """
    batches = set()
    for value in (*model.graph.inputs, *model.graph.outputs):
        if not value.shape or value.shape.is_static(0) or value.shape.is_unknown_dim(0):
            raise ExportError(
                f"the exported graph has a fixed batch: expected a dynamic first dimension of {value.name}, got "
                f"{value.shape}",
                hint=DYNAMIC_BATCH_HINT,
            )
        batches.add(value.shape[0])
    if len(batches) > 1:
        shapes = ", ".join(f"{value.name} {value.shape}" for value in (*model.graph.inputs, *model.graph.outputs))
        raise ExportError(
            f"expected the same batch in the inputs and outputs of the exported graph, got {shapes}",
            hint=DYNAMIC_BATCH_HINT,
        )


def _reason_of_exporter(exc: Exception) -> str:
    """Return the first line of the first cause, and the last line of a forward that the exporter's report names."""
    cause: BaseException = exc
    while cause.__cause__ is not None:
        cause = cause.__cause__
    first = next(iter(str(cause).strip().splitlines()), "")
    reason = f"{type(cause).__name__}: {first}" if first else type(cause).__name__
    places = _PLACE.findall(str(exc))
    if not places:
        return reason
    file, number, code = places[-1]
    return f"{reason}; the exporter stopped at {file}, line {number}: {code.strip()}"


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Suppress the exporter's messages about progress, deprecations, missing torchvision, and graphs that fail."""
    level, stderr = logging.root.manager.disable, cast("Any", _WithoutGraphs(sys.stderr))
    logging.disable(max(level, logging.ERROR))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class _WithoutGraphs:
    """A stream without the graphs that ``torch.export`` prints when it fails; progress of another thread passes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._graph_before = False

    def write(self, text: str) -> int:
        is_graph = text.lstrip().startswith(_GRAPHS)
        if is_graph or (self._graph_before and text == "\n"):
            self._graph_before = is_graph
            return len(text)
        self._graph_before = False
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
