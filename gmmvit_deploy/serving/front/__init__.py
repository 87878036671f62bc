"""``/classify``: a process that takes an image file and asks its Triton server.  The face: `options`, `process`."""
