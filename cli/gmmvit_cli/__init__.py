"""The ``gmmvit`` command: a file for each command, which parses options, calls the library once and prints."""
