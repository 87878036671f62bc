"""Scripts that measure, by what their results are for; README.md lists them."""
