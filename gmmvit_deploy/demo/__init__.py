"""Train a small model on scikit-learn's digits, and take it through every step.  The face: `run`, and its `models`."""
