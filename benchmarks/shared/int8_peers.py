"""Quantise or compile a straight export with another project's tool.

`int8_real.py` and `fastest_cpu.py` run this file with the Python of an environment that has the tool, so the file
imports nothing of this project. Needs numpy, onnx and, by recipe:

    nncf_default     pip install nncf openvino      NNCF with model_type=TRANSFORMER, nothing else changed
    nncf_extremes    pip install nncf openvino      the same with the largest and the smallest values, SmoothQuant 0.5
    nncf_accuracy    pip install nncf openvino      NNCF with accuracy control: parts return to floating point until
                                                    99.8 % of the decisions are those of float32
    ort_static       pip install onnxruntime sympy  quantize_static with Q/DQ pairs and a scale for each channel, after
                                                    quant_pre_process
    ort_dynamic      pip install onnxruntime sympy  quantize_dynamic with a scale for each channel, after the same
    modelopt         pip install nvidia-modelopt[onnx]    Model Optimizer with its default, calibrated on the CPU; all
                                                    other operators stay in float32
    modelopt_max     pip install nvidia-modelopt[onnx]    the same with the largest values
    aotinductor      pip install torch              AOTInductor in float32, with constant weights
    pt2e_static      pip install torch torchao      PyTorch's int8 for x86 with its default, compiled by AOTInductor
    pt2e_dynamic     pip install torch torchao      the same, with ranges of activations from each input

    PYTHON int8_peers.py RECIPE STRAIGHT.onnx IMAGES.npy OUTPUT

STRAIGHT.onnx: for PyTorch's recipes, STRAIGHT.pt2 beside it is read, a program of `torch.export`.
IMAGES.npy: the calibration images (N, channels, height, width), float32, in random order.
OUTPUT: an .xml file of OpenVINO for NNCF; a .pt2 package with the models "1" and "16", each for that number of images,
for PyTorch; else an .onnx file. The tool's versions are written beside it, as .json.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

INPUT = "tensor"
PACKAGED_BATCHES = (1, 16)


def nncf(graph: Path, images: np.ndarray, output: Path, **more: Any) -> None:
    import nncf
    import openvino

    dataset = nncf.Dataset([image[None] for image in images])
    model = openvino.Core().read_model(graph)
    openvino.save_model(nncf.quantize(model, dataset, model_type=nncf.ModelType.TRANSFORMER, **more), output)


def nncf_extremes(graph: Path, images: np.ndarray, output: Path) -> None:
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, AdvancedSmoothQuantParameters
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    advanced = AdvancedQuantizationParameters(
        activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
        smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=0.5),
    )
    nncf(graph, images, output, advanced_parameters=advanced, subset_size=len(images))


def nncf_accuracy(graph: Path, images: np.ndarray, output: Path) -> None:
    """Calibrate with half of the images; the decisions of float32 on the other half are the labels."""
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
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(graph, prepared)
        quantize_dynamic(prepared, output, per_channel=True)


def modelopt(graph: Path, images: np.ndarray, output: Path, **more: Any) -> None:
    from modelopt.onnx.quantization import quantize

    with tempfile.TemporaryDirectory() as folder:  # the tool writes files beside the graph, and rewrites the graph
        copied = shutil.copy(graph, folder)
        quantize(
            copied,
            quantize_mode="int8",
            calibration_data={INPUT: images},
            calibration_eps=["cpu"],
            high_precision_dtype="fp32",
            output_path=str(output),
            **more,
        )


def aotinductor(graph: Path, images: np.ndarray, output: Path) -> None:
    import torch

    write_package(torch.export.load(graph.with_suffix(".pt2")).module(), images, output)


def pt2e(graph: Path, images: np.ndarray, output: Path, **config: Any) -> None:
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


RECIPES: dict[str, Callable[[Path, np.ndarray, Path], None]] = {
    "nncf_default": nncf,
    "nncf_extremes": nncf_extremes,
    "nncf_accuracy": nncf_accuracy,
    "ort_static": ort_static,
    "ort_dynamic": ort_dynamic,
    "modelopt": modelopt,
    "modelopt_max": partial(modelopt, calibration_method="max"),
    "aotinductor": aotinductor,
    "pt2e_static": pt2e,
    "pt2e_dynamic": partial(pt2e, is_dynamic=True),
}

TOOLS = {
    "nncf_default": ("nncf", "openvino"),
    "nncf_extremes": ("nncf", "openvino"),
    "nncf_accuracy": ("nncf", "openvino"),
    "ort_static": ("onnxruntime",),
    "ort_dynamic": ("onnxruntime",),
    "modelopt": ("nvidia-modelopt",),
    "modelopt_max": ("nvidia-modelopt",),
    "aotinductor": ("torch",),
    "pt2e_static": ("torch", "torchao"),
    "pt2e_dynamic": ("torch", "torchao"),
}

if __name__ == "__main__":
    recipe, graph, images, output = sys.argv[1], *map(Path, sys.argv[2:])
    RECIPES[recipe](graph, np.load(images), output)
    versions = {tool: version(tool) for tool in TOOLS[recipe]}
    output.with_suffix(".json").write_text(json.dumps(versions), encoding="utf-8")
