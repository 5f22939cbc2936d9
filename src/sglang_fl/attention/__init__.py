"""Attention over our operators: the backend, its layers, a step's batch, and the pools of the cache."""
