"""Quantise or compile a straight export with another project's tool.

`int8_real.py` and `fastest_cpu.py` run this file with the Python of an environment that has the tool, so the file
imports nothing of this project. Needs numpy, onnx and the tools of the recipe (`RECIPES`); those of ONNX Runtime also
need sympy.

    PYTHON int8_peers.py RECIPE STRAIGHT.onnx IMAGES.npy OUTPUT

STRAIGHT.onnx: for PyTorch's recipes, STRAIGHT.pt2 beside it is read, a program of `torch.export`.
IMAGES.npy: the calibration images (N, channels, height, width), float32, in random order.
OUTPUT: an .xml file of OpenVINO for NNCF; a .pt2 package with the models "1" and "16", each for that number of images,
for PyTorch; else an .onnx file. The tool's versions are written beside it, as .json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

INPUT = "tensor"
PACKAGED_BATCHES = (1, 16)


def nncf(graph: Path, images: np.ndarray, output: Path, **more: Any) -> None:
    """NNCF with model_type=TRANSFORMER, nothing else changed."""
    import nncf
    import openvino

    dataset = nncf.Dataset([image[None] for image in images])
    model = openvino.Core().read_model(graph)
    openvino.save_model(nncf.quantize(model, dataset, model_type=nncf.ModelType.TRANSFORMER, **more), output)


def nncf_extremes(graph: Path, images: np.ndarray, output: Path) -> None:
    """The same with the largest and the smallest values, and SmoothQuant with 0.5."""
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, AdvancedSmoothQuantParameters
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    advanced = AdvancedQuantizationParameters(
        activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
        smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=0.5),
    )
    nncf(graph, images, output, advanced_parameters=advanced, subset_size=len(images))


def nncf_accuracy(graph: Path, images: np.ndarray, output: Path) -> None:
    """NNCF with accuracy control: parts return to floating point until 99.8 % of the decisions are those of float32.

    Half of the images calibrate; the decisions of float32 on the other half are the labels.
    """
    import nncf
    import openvino

    model = openvino.Core().read_model(graph)
    exact = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    judged = [(image[None], int(exact(image[None])[0].argmax())) for image in images[len(images) // 2 :]]

    def kept(compiled: Any, data: Any) -> tuple[float, list[float]]:
        right = [float(compiled(image)[0].argmax() == decision) for image, decision in data]
        return float(np.mean(right)), right

    quantised = nncf.quantize_with_accuracy_control(
        model,
        nncf.Dataset([image[None] for image in images[: len(images) // 2]]),
        nncf.Dataset(judged),
        kept,
        max_drop=0.002,
        model_type=nncf.ModelType.TRANSFORMER,
    )
    openvino.save_model(quantised, output)


def ort_static(graph: Path, images: np.ndarray, output: Path) -> None:
    """quantize_static with Q/DQ pairs and a scale for each channel, after quant_pre_process."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(images)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.batches, None)
            return None if image is None else {INPUT: image[None]}

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(graph, prepared)
        quantize_static(prepared, output, Reader(), quant_format=QuantFormat.QDQ, per_channel=True)


def ort_dynamic(graph: Path, images: np.ndarray, output: Path) -> None:
    """quantize_dynamic with a scale for each channel, after quant_pre_process."""
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(graph, prepared)
        quantize_dynamic(prepared, output, per_channel=True)


def aotinductor(graph: Path, images: np.ndarray, output: Path) -> None:
    """AOTInductor in float32, with constant weights."""
    import torch

    write_package(torch.export.load(graph.with_suffix(".pt2")).module(), images, output)


def pt2e(graph: Path, images: np.ndarray, output: Path, **config: Any) -> None:
    """PyTorch's int8 for x86 with its default, compiled by AOTInductor."""
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(**config))
    prepared = prepare_pt2e(torch.export.load(graph.with_suffix(".pt2")).module(), quantizer)
    with torch.no_grad():
        for first in range(0, len(images), 32):  # its histograms are slow, and cost the same for each call
            prepared(torch.from_numpy(images[first : first + 32]))
    write_package(convert_pt2e(prepared), images, output)


def write_package(module: Any, images: np.ndarray, output: Path) -> None:
    import torch
    from torch._inductor.package import package_aoti

    models = {}
    with torch.no_grad():
        for batch in PACKAGED_BATCHES:
            program = torch.export.export(module, (torch.from_numpy(images[:batch]),))
            options = {"freezing": True, "aot_inductor.package": True}
            models[str(batch)] = torch._inductor.aot_compile(program.module(), *program.example_inputs, options=options)
    package_aoti(output, models)


class Recipe(NamedTuple):
    """tools: the packages whose versions are written.  suffix: of the file that ``make`` writes."""

    make: Callable[[Path, np.ndarray, Path], None]
    tools: tuple[str, ...]
    suffix: str


RECIPES = {
    "nncf_default": Recipe(nncf, ("nncf", "openvino"), ".xml"),
    "nncf_extremes": Recipe(nncf_extremes, ("nncf", "openvino"), ".xml"),
    "nncf_accuracy": Recipe(nncf_accuracy, ("nncf", "openvino"), ".xml"),
    "ort_static": Recipe(ort_static, ("onnxruntime",), ".onnx"),
    "ort_dynamic": Recipe(ort_dynamic, ("onnxruntime",), ".onnx"),
    "aotinductor": Recipe(aotinductor, ("torch",), ".pt2"),
    "pt2e_static": Recipe(pt2e, ("torch", "torchao"), ".pt2"),
    "pt2e_dynamic": Recipe(partial(pt2e, is_dynamic=True), ("torch", "torchao"), ".pt2"),
}

if __name__ == "__main__":
    recipe, graph, images, output = sys.argv[1], *map(Path, sys.argv[2:])
    RECIPES[recipe].make(graph, np.load(images), output)
    versions = {tool: version(tool) for tool in RECIPES[recipe].tools}
    output.with_suffix(".json").write_text(json.dumps(versions), encoding="utf-8")
