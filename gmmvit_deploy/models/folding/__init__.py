"""Folding: what is constant at inference becomes a constant.  The face: `fold` runs the `passes`."""
