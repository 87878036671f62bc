"""The service that ``benchmarks/hostile.py`` asks, how it sends the inputs, and which input ends a process."""
