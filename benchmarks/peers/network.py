"""The network that inference nodes compute beside each other, in NumPy: 8 numbers in, two layers of 64, 4 out."""

import numpy as np

INPUTS, HIDDEN, OUTPUTS = 8, 64, 4
_RANDOM = np.random.default_rng(0)
LAYERS = [
    (_RANDOM.standard_normal((a, b), np.float32) / np.sqrt(a, dtype=np.float32), np.zeros(b, np.float32))
    for a, b in ((INPUTS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, OUTPUTS))
]
"""Weights and biases."""


def computed(inputs):
    """Rows [B, 8] to rows [B, 4]."""
    for depth, (weight, bias) in enumerate(LAYERS, start=1):
        inputs = inputs @ weight + bias
        if depth < len(LAYERS):
            inputs = np.tanh(inputs)
    return inputs
