"""What is reported: the tables of README and documentation, and the speed of a change."""
