"""Measurements for the tables of README and documentation, and for the speed of a change."""
