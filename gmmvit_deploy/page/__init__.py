"""Serve a web page on which visitors try a bundle: labels, the network's input, masks, times, agreement with PyTorch.

A bundle is the folder that ``gmmvit export`` writes.

The face: `server` (opens the address, serves the page, limits requests) and `trial` (classifies an encoded image, and
measures agreement and times; needs no browser and no web library).
"""
