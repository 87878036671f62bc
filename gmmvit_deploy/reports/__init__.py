"""HTML reports: their layout, plots, and pictures of masks and attention."""
