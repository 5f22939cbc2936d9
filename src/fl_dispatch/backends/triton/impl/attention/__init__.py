"""Attention over a paged cache, plain and latent, and the writes into the cache."""
