"""Attention over many queries of a request: one group of warps loads, two of 64 queries each multiply.

Before its softmax each consumer issues the products with the next keys and with the last values, and consumers do not
wait for each other. So the tensor cores work while the softmax weights are computed.
"""
