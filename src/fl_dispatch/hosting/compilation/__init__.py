"""Compiled models: references that Inductor fuses, and equal numbers for equal kernels."""
