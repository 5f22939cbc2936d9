"""Quantized layers over our operators: what both hosts' layers have in common, whoever loaded the checkpoint."""
