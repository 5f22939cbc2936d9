"""Quantized layers over our operators: the code that both hosts' layers share."""
