"""Attention over many queries of a request: one group of warps loads, two of 64 queries each multiply.

Each consumer issues the products of the next keys and of the last values before its softmax, and neither waits for the
other. So the tensor cores work while weights are computed.
"""
