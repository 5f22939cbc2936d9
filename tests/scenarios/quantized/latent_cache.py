"""A latent cache in fp8: what an engine with one should compute for one request at a time, and what it must not.

A step of several tokens of a request reads their own latents as they are, and those before them from the cache; a step
of one token reads all of them from the cache. Right is Hugging Face's network whose latents are rounded so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.cli.half_precision import LARGEST, MEAN
from quantized_mixture import LATENT_LAYERS
from quantized_network import distance, network, scores, with_fp8_latents
from running import MAX_TOKENS, PROMPTS

OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill")
CHUNK, BLOCK = 64, 16
"""Tokens of a step at most, and of a block."""
ENGINE = {"kv_cache_dtype": "fp8", "max_num_seqs": 1, "max_num_batched_tokens": CHUNK}
ALL_ONE = (1.0,) * LATENT_LAYERS
SCALES = (0.011, 0.017, 0.023)
PLANTED = 1.1
"""A factor by which scales are wrong."""


def own(tokens: int, cached: int = 0) -> list[int]:
    """For each token of a text, the first one whose latents its step reads as they are."""
    prompt = tokens - MAX_TOKENS
    ends = sorted({*range(CHUNK, cached, CHUNK), *range(cached, prompt, CHUNK), prompt} - {0})
    firsts: list[int] = []
    for end in ends:
        begin = len(firsts)
        firsts += [begin if end - begin > 1 else end] * (end - begin)
    return [*firsts, *range(prompt + 1, tokens + 1)]


def rounded(
    model: Path,
    scales: Sequence[float],
    of: Callable[[int], Sequence[int]] = own,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The network of a checkpoint with such a cache."""
    return with_fp8_latents(network(None, model=model, dtype=dtype), scales, of)


def is_as_near_in_bfloat16(model: Path, texts: Sequence[Sequence[int]], got: Tensor) -> bool:
    """Whether an engine in bfloat16 is about as near to the network in float32 as Hugging Face's in bfloat16."""
    exact = scores(rounded(model, ALL_ONE), texts)
    theirs = scores(rounded(model, ALL_ONE, dtype=torch.bfloat16), texts)
    mean = (got - exact).abs().mean() <= MEAN * (theirs - exact).abs().mean()
    return bool(mean) and distance(got, exact) <= LARGEST * distance(theirs, exact)


def read_from_cache(tokens: int) -> range:
    """As :func:`own` for steps that read their own latents from the cache, too."""
    return range(1, tokens + 1)


def others(
    model: Path, scales: Sequence[float], texts: Sequence[Sequence[int]], of: Callable[[int], Sequence[int]] = own
) -> dict[str, Tensor]:
    """Log-probabilities of networks with other caches."""
    found = {
        "not quantized": scores(network(None, model=model), texts),
        "other scales": scores(rounded(model, [PLANTED * scale for scale in scales], of), texts),
        "other steps": scores(rounded(model, scales, read_from_cache if of is own else own), texts),
    }
    if len({*scales}) > 1:
        found["scales of the layer before"] = scores(rounded(model, (scales[-1], *scales[:-1]), of), texts)
    return found


def behind(model: Path, scales: Sequence[float], found: Sequence[Mapping[str, Any]]) -> float:
    """The largest difference of answers' log-probabilities from those of a network that reads the same from a cache."""
    largest = 0.0
    for prompt, answer in zip(PROMPTS, found, strict=True):
        (tokens,), (given,) = answer["tokens"], answer["logprobs"]
        got = torch.tensor([step[str(token)] for token, step in zip(tokens, given, strict=True)])
        made = rounded(model, scales, lambda n, cached=answer["cached"]: own(n, cached))
        largest = max(largest, float((got - scores(made, [[*prompt, *tokens]])[-MAX_TOKENS:]).abs().max()))
    return largest
