"""Compiled programs of ONNX Runtime and OpenVINO, and the client of a Triton server; used by the runners."""
