"""Quantized layers over our operators: the common part of both hosts' layers, whichever host loaded the checkpoint."""
