"""What computes logits: PyTorch, ONNX Runtime, OpenVINO, TensorRT engines, a Triton server, CPU kernels."""
