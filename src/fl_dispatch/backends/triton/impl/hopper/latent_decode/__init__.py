"""Decode for latent attention with many rows of a request: two groups of warps load, two multiply.

The sums of 64 rows over 512 values fill the registers of two consumers, so each consumer sums half of the values. 64
latent rows, which are keys and values, fill one of the two stages that a multiprocessor has room for. Each consumer
computes the scores of one stage, and passes the weights to the other through shared memory, in the place of the
rotary part of that stage's keys. So each score is computed once, and the softmax of one consumer overlaps with the
products of the other.
"""
