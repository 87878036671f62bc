"""A page in the browser to try a bundle: what it answers, what it sees, where it looks, and whether a server agrees.

trial     an encoded image → an answer with its proof and its times: no browser and no web library
facts     what a bundle states of itself, as rows of text
html      answers and facts as HTML
view      the page itself, built with NiceGUI
server    the address it is served at, and what no visitor may do
"""
