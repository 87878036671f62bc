"""Kernels for attentions with constant masks on CPUs, as operations of OpenVINO: their sources, compiled and kept.

`gmmvit_deploy.inference` finds the attentions of a graph and puts the kernels into it.
"""
