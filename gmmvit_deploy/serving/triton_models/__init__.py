"""Python models that run inside Triton: the preprocessing of images and the network.  They check every request."""
