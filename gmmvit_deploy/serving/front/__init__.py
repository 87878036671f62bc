"""A process that takes images by HTTP, and asks its Triton server.  The face: `options`, `process`."""
