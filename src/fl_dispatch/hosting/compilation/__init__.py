"""Compiled models: references that Inductor fuses, and shared numbers for equal kernels."""
