"""ONNX graph to ONNX graph: fold constants, assign roles, change precision, quantise, prove what is inside."""
