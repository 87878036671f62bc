"""The ``gmmvit`` command: one thin file a command, each parses, calls the library once and prints."""
