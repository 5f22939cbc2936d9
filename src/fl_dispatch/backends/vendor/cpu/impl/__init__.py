"""Calls of the compiled kernels, and what they ask of their arguments."""
