"""Attention over a paged cache, plain and latent, and the cache's writes."""
