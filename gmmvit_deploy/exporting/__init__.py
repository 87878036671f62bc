"""A trained model to a bundle: ONNX graph, other precisions, and the proof that they give PyTorch's logits.

The face: `bundle_from_checkpoint`, `from_module` (a network in memory), `options`, `variants` (precisions),
`onnx_from_model`, `golden` (reference outputs).
"""
