"""The bundle that export writes: its manifest, its graphs in each precision, its reference outputs."""
