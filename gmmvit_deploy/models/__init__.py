"""Vision transformers as mathematics in PyTorch: layers, steps on the scores, families, folding."""
