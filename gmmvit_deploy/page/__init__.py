"""Serve a web page on which visitors try a bundle: labels, the network's input, masks, times, agreement with PyTorch.

A bundle is the folder that ``gmmvit export`` writes. The modules of this folder are:

trial     classifies an encoded image, and measures agreement and times; needs no browser and no web library
facts     reads the parity at export and the metadata of a bundle, as rows of text
html      converts answers and facts to HTML
view      draws the page with NiceGUI
server    opens the address and serves the page
guard     limits the requests that the page accepts
"""
