"""Inputs of operators: samples and probes for verification, shapes for benchmarks."""
