"""Element-wise kernels: activations, norms, rotation, quantization of rows."""
