"""Compiled models: what Inductor fuses, and equal numbers for equal kernels."""
