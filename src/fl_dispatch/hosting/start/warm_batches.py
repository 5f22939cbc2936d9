"""Batches of every kind, so that a start compiles each kernel that a request may need.

Kernels are compiled for kinds of batches: decode or prefill, short or long, one request or many. A host's start calls
its operators on these; ``fl tune`` does the same before it checks whether an implementation compiles later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from ... import get_policy

QUERIES = (1, 2, 3, 5, 9, 17, 33, 65, 200)
"""New tokens of a request: each in another power of two, at which kernels change."""
REQUESTS = (1, 2, 5, 40)

MIXED = ((1,), (1, 1, 1, 1))
"""New tokens of requests in a batch with a long one."""
LONG = (70, 300)

KEYS = (1024, 4096)
"""Longest sequences of batches that read prompts."""
DECODE_KEYS = (256, 512, 1024, 2048, 4096, 8192)
"""Longest sequences of decode batches, at which kernels divide a request's keys among twice as many programs."""


def rules(operators: Iterable[str], scope: str | None) -> list[str]:
    """Return the policy's rules for a layer's operators; layers with different rules are of different kinds."""
    policy = get_policy()
    return [str(rule(op, scope)) for op in operators for rule in (policy.get_per_op_order, policy.get_tuned_rules)]


def token_counts(most: int) -> list[int]:
    """Return tokens of batches to run without a KV cache: powers of two, at which kernels change, and the largest."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def beginnings(operators: Iterable[str], scope: str | None) -> set[int]:
    """Return numbers of tokens at which the policy's rules begin to choose differently for a layer's operators."""
    policy = get_policy()
    found = (rule.tokens for op in operators for rule in policy.get_tuned_rules(op, scope) if rule.tokens is not None)
    return {start for low, high in found for start in (low, 0 if high is None else high + 1) if start > 0}


def request_counts(most: int) -> list[int]:
    """Return numbers of requests with one token each: four per power of two, because vLLM tunes kernels for each."""
    steps = (quarter << power >> 2 for power in range(most.bit_length()) for quarter in (4, 5, 6, 7))
    return sorted({most, *(step for step in steps if step <= most)})


def state_batches(
    most_tokens: int, most_requests: int, among: Iterable[int] = ()
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield batches of layers with a state: requests with one new token and a state, and prompt lengths.

    Args:
        most_tokens, most_requests: limits of a batch.
        among: further numbers of tokens, alone and as a prompt.
    """
    most = min(most_tokens, most_requests)
    yield from ((single, ()) for single in sorted({*request_counts(most), *(n for n in among if n <= most)}))
    yield from ((0, (length,)) for length in sorted({*among}) if length <= most_tokens)
    for single, prompts in ((0, (3,)), (0, (200,)), (1, (17,)), (3, (70, 2))):
        if single + sum(prompts) <= most_tokens and single + len(prompts) <= most_requests:
            yield single, prompts


def attention_batches(most_tokens: int, most_requests: int, length: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the new tokens of each request of a batch, and the number of keys that the batch announces.

    Args:
        most_tokens, most_requests: limits of a batch.
        length: the longest sequence.
    """
    alike = ((queries,) * requests for queries, requests in product(QUERIES, REQUESTS))
    mixed = ((*some, min(long, most_tokens - len(some))) for some, long in product(MIXED, LONG))
    for queries in (*alike, *mixed):
        possible = sum(queries) <= most_tokens and len(queries) <= most_requests
        if possible and min(queries) > 0:
            keys = DECODE_KEYS if max(queries) == 1 else KEYS
            lengths = {max(queries), length, *(min(length, most) for most in keys)}
            yield from ((queries, longest) for longest in sorted(lengths) if max(queries) <= longest <= length)
