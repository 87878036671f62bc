"""What is reported: the README's tables and the speed of a change."""
