"""Layers of the families: attention, blocks, embeddings, and the roles that they declare."""
