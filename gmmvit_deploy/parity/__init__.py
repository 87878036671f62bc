"""Compare what runners compute with PyTorch: logits, decisions, accuracy, preprocessing, and suspects by name.

The face: `check` (all checks) and `options`, `reference` (PyTorch's logits), `suspects` (usual mistakes), `inputs` and
`measures`, `report` and `page`.
"""
