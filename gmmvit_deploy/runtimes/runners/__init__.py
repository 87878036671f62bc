"""One interface for all that computes logits.  The face: `open` (a runner by name), `runner`, `classify`."""
