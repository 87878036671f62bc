"""Image files to network input: the image spec, preprocessing, resize rules, labels and data sets."""
