"""What computes a network's answers: images to tensors, a graph in OpenVINO or ONNX Runtime, logits to labels.

``gmmvit repository`` copies this folder whole into each Python model of a Triton repository, as the package
``gmmvit_inference``, and the rest of this project imports it too: a server computes with the code that parity checked.
The modules therefore import each other relatively, and otherwise only the standard library, numpy and Pillow; openvino
and onnxruntime inside functions. The server's Python can be 3.10.
"""

DEFERRED = "deferred"
"""The name of the output (B, 1) of a cascade (`cascade`) that says which images float32 computed again: bool."""
PROBE_ID = "gmmvit-probe"
"""The id of the requests with which a service looks whether the network answers; they count as no images."""
GROUPED = "grouped"
"""The parameter of a request whose images are those of several clients: it is refused if a client would have to wait
for another client's large image."""
