"""The paper's recipe, for a user without a checkpoint.

The face: `recipe`, `networks`, `images`, `trainer` (one process), `processes` (several), `run` (the command).
"""
