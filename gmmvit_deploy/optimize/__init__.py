"""Choose a bundle's fastest runner and precision on this machine that hold a gate.  The face: `run`, `page`."""
