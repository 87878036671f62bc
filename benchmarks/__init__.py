"""Benchmark scripts, grouped by the use of their results; README.md lists them."""
