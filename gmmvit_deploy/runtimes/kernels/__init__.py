"""Kernels for attentions with constant masks on CPUs, as operations of OpenVINO.

The face: `matcher` (which attentions of a graph), `libraries` (compile and keep), `openvino_kernels` (put into
a graph).
"""
