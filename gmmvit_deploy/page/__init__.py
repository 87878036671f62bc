"""Serve a web page on which visitors try a bundle: labels, the network's input, masks, times, agreement with PyTorch.

A bundle is the folder that ``gmmvit export`` writes. The modules of this folder are:

trial     classifies an encoded image, and measures agreement and times; needs no browser and no web library
html      converts answers and facts about the bundle to HTML
view      draws the page with NiceGUI
server    opens the address, serves the page, and limits the requests that the page accepts
"""
