"""Attention over our operators: the backend, its layers, a step's batch, trees of drafts, and the cache's pools."""
