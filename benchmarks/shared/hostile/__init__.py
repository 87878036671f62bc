"""Hostile inputs, in a file for each kind; `benchmarks/reported/hostile.py` sends them.

To add an input, add a line to the table at the end of the file of its kind. No two lines may differ only in a size or a
seed: each line is another mistake or attack.
"""
