"""Settings of ONNX Runtime and OpenVINO on this machine, images in batches, and the client of a Triton server."""
