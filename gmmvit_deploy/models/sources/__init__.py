"""How a checkpoint of a family is recognised and read: sources, hints, shapes of tensors."""
