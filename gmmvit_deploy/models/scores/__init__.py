"""Steps on the attention scores, before and after softmax: masks, biases, scales, mixing of heads."""
