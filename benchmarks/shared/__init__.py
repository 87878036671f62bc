"""Code that several scripts share: the paper's models, CPU programs, folders of results, tables."""
