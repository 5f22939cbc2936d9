"""Decoding of latent attention for many rows of a request: two groups of warps load, two multiply.

The sums of 64 rows over 512 values fill the registers of two consumers, and 64 latent rows, which are keys and values,
fill one of the two stages that a processor has room for. So both consumers compute the scores of a tile, and each adds
up half of the values: that costs half as much again as to compute scores once, but they have nothing to tell each
other, and one's softmax runs beside the other's products.
"""
