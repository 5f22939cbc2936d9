"""Calls of the compiled kernels, and the kernels' requirements on their arguments."""
