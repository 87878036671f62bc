"""Files to spec and weights, without running code of a file.

The face: `loading` (a checkpoint to a trained model, and its description), `own_class` (of a user), `reading` (tensors
by name), `weights` (of a bundle), `audit` (what the weights look like).
"""
