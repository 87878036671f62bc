"""Data sets and files of images.  The face: `open` (by ``KIND:PATH``), `images`, `files`, `formats`."""
