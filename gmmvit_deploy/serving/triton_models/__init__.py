"""The ``model.py`` of each Python model: preprocessing, network and labels.  They check every request."""
