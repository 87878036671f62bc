"""Code that several scripts use: the paper's models, the programs on CPUs, the folders of results, and the tables."""
