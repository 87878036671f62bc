"""Names of the backends of a Triton repository, and defaults that the command line states.

This module imports no backend.
"""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["onnxruntime", "python", "tensorrt"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
OLDEST_RELEASE, OLDEST_CUDA_RELEASE = "24.05", "24.06"
"""The oldest releases of NVIDIA's Triton container whose ONNX Runtime backend loads this project's graphs: with ONNX
Runtime 1.18 (those before were not tried; they also read IR version 9, which most graphs have); and with the runner
``onnxruntime-cuda``, whose accelerator that release does not know.
"""
OLDEST_IMAGE_RELEASE = "24.11"
"""The oldest release of NVIDIA's container in which this package can be installed; those before have Python 3.10."""
DEFAULT_REQUEST_PIXELS = 200_000_000
"""The maximum number of pixels in the images of a request: 16 photographs of 12 megapixels, or 4 of 50 megapixels."""
DEFAULT_AGREEMENT = 0.95
"""The smallest share of the images to which an old and a new bundle must give the same label, in a rollout."""
TUNING_FILE = "gmmvit_tuning.json"
"""File in a repository of ``gmmvit tune``: all trials, and the rate and latency limit of the best."""
