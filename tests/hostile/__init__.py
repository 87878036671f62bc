"""Hostile inputs, in a file for each kind; `benchmarks/hostile.py` sends them.

To add an input, add a line to the table at the end of the file of its kind. Each line is another mistake or attack: a
line that differs from another line in a size or a seed alone shows nothing new.
"""
