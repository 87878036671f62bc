"""A new bundle into a running service.  The face: `control` (orders and their events), `run` (the service)."""
