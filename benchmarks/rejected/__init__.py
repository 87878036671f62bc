"""Ideas that were measured and rejected."""
