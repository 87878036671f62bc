"""Serve a page in the browser to try a bundle: labels, the network's input, masks, times, agreement with a server.

trial     an encoded image → an answer with its agreement and its times, without a browser or web library
facts     what a bundle states about itself, as rows of text
html      answers and facts as HTML
view      the page itself, built with NiceGUI
server    the page's address and application
guard     bounds on requests
"""
