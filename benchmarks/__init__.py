"""Benchmark scripts; README.md lists them."""
