"""Serve a web page to try a bundle: labels, the network's input, masks, times, agreement with a server.

trial     an encoded image → an answer with agreements and times; needs no browser and no web library
facts     the parity at export and the metadata of a bundle, as rows of text
html      answers and facts as HTML
view      the page itself, built with NiceGUI
server    the page's address and application
guard     bounds on requests
"""
