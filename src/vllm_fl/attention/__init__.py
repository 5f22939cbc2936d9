"""Attention over our operators, dense and latent: backends, a step's batch, and the layout of the cache."""
