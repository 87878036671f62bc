"""TensorRT engines.  The face: `engine_from_onnx`, `options`, `flavors`, `card` (the build report), `session`."""
