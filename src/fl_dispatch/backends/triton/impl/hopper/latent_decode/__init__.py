"""Decode for latent attention with many rows of a request: two groups of warps load, two multiply.

The sums of 64 rows over 512 values fill the registers of two consumers. 64 latent rows, which are keys and values, fill
one of the two stages that a multiprocessor has room for. So both consumers compute the scores of a tile, and each sums
half of the values. This costs half as much again as computing scores once, but the consumers exchange no data, and the
softmax of one overlaps with the products of the other.
"""
