"""ONNX graph to ONNX graph: fold constants, assign roles, change precision, quantise, prove what is inside.

A graph is an ``onnx_ir.Model``, from the exporter to the file.
"""
