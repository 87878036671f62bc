"""Choose the fastest runner and precision of a bundle on this machine whose accuracy holds.  The face: `run`, `page`."""
