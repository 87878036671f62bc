"""Image files to network input: the image spec, resize rules, names of classes and data sets."""
