"""What several scripts use: the paper's models, programs of a CPU, folders of results, tables."""
