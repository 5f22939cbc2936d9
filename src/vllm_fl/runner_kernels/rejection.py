"""Rejection sampling of draft tokens in plain PyTorch (Leviathan et al., arXiv 2211.17192).

Each function has the parameters of the Triton kernel of the same name in ``vllm.v1.sample.rejection_sampler``, in its
order. Drafts of all requests are concatenated: those of request ``r`` end before ``ends[r]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _places(ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(drafts of each request, request of each draft, position of each draft in its request)``."""
    lengths = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    requests = torch.repeat_interleave(lengths)
    positions = torch.arange(requests.shape[0], device=ends.device) - (ends.long() - lengths)[requests]
    return lengths, requests, positions


def _emit(output: Tensor, ends: Tensor, accepted: Tensor, tokens: Tensor, bonus: Tensor, active: Tensor) -> None:
    """Write, for every active request, its tokens up to the first rejected draft, or all and the bonus token."""
    lengths, requests, positions = _places(ends)
    rejected = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    rejected[requests, positions] = ~accepted
    before = rejected.cumsum(dim=1) - rejected.int()  # rejections before each position
    written = active[requests] & (before[requests, positions] == 0)
    output[requests[written], positions[written]] = tokens[written].to(output.dtype)
    whole = active & ~rejected.any(dim=1)
    output[whole, lengths[whole]] = bonus.flatten()[whole].to(output.dtype)


def rejection_greedy_sample_kernel(
    output: Tensor,
    ends: Tensor,
    drafts: Tensor,
    target_argmax: Tensor,
    bonus: Tensor,
    is_greedy: Tensor | None,
    max_spec_len: int,
    uniform: Tensor | None,
    rates: Tensor | None,
    synthetic: bool,
) -> None:
    """Accept drafts that are the target's best token.

    Args:
        output: ``[requests, max_spec_len + 1]`` int32; the used part of greedy requests' rows is overwritten.
        ends: ``[requests]``; end of each request's drafts.
        drafts, target_argmax: ``[drafts]``; a negative draft is padding and never accepted.
        bonus: ``[requests, 1]``; the token after a request's last draft.
        is_greedy: ``[requests]`` bool, or ``None`` if all are.
        uniform, rates: ``[drafts]`` and ``[positions]``; with ``synthetic``, a draft is accepted if its uniform number
            is below the rate of its position, whatever the target says.
    """
    active = torch.ones(output.shape[0], dtype=torch.bool, device=output.device) if is_greedy is None else is_greedy
    tokens = target_argmax
    if synthetic:
        assert uniform is not None
        assert rates is not None
        accepted = (uniform < rates[_places(ends)[2]]) & (drafts >= 0)
        tokens = torch.where(accepted, drafts.long(), target_argmax)
    else:
        accepted = drafts == target_argmax
    _emit(output, ends, accepted, tokens, bonus, active)


def rejection_random_sample_kernel(
    output: Tensor,
    ends: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus: Tensor,
    recovered: Tensor,
    uniform: Tensor,
    is_greedy: Tensor,
    max_spec_len: int,
    vocab_size: int,
    rates: Tensor | None,
    no_draft_probs: bool,
    synthetic: bool,
) -> None:
    """Accept a draft with probability ``min(1, target / draft)``; a rejected one becomes its recovered token.

    Args:
        output, ends, drafts, bonus, rates, synthetic: see :func:`rejection_greedy_sample_kernel`; here the rows of
            greedy requests stay unchanged.
        draft_probs: ``[drafts, vocab_size]``, or ``None`` if the drafter was certain.
        target_probs: ``[drafts, vocab_size]`` float32.
        recovered: ``[drafts]``; the tokens that :func:`sample_recovered_tokens_kernel` drew.
        uniform: ``[drafts]`` float64 in [0, 1).
    """
    if synthetic:
        assert rates is not None
        accepted = uniform < rates[_places(ends)[2]]
    else:
        index = drafts.long().clamp(min=0)[:, None]
        target = target_probs.gather(1, index).squeeze(1)
        draft = torch.ones_like(target) if draft_probs is None else draft_probs.gather(1, index).squeeze(1)
        accepted = (draft > 0) & (target / draft >= uniform)
    accepted = accepted & (drafts >= 0)
    _emit(output, ends, accepted, torch.where(accepted, drafts, recovered), bonus, ~is_greedy)


def expand_kernel(output: Tensor, values: Tensor, ends: Tensor, replace_from: Any, replace_to: Any, *_: Any) -> None:
    """Repeat a request's value for each of its tokens; ``output`` ``[tokens]`` is overwritten.

    Args:
        values: ``[requests]``; ``replace_from`` is written as ``replace_to``.
    """
    output.copy_(values.masked_fill(values == replace_from, replace_to)[_places(ends)[1]])


def sample_recovered_tokens_kernel(
    output: Tensor,
    ends: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    inverse_noise: Tensor,
    *_: Any,
) -> None:
    """Draw each draft's replacement from ``max(0, target - draft)``, by the exponential race that vLLM's sampler uses.

    Args:
        output: ``[drafts]``; overwritten.
        draft_probs: ``[drafts, vocab_size]``, or ``None`` if the drafter was certain, so that only its token is
            excluded.
        target_probs: ``[drafts, vocab_size]`` float32.
        inverse_noise: ``[requests, vocab_size]``; reciprocals of exponential noise.
    """
    if draft_probs is None:
        vocabulary = torch.arange(target_probs.shape[1], device=target_probs.device)
        left = target_probs.masked_fill(vocabulary == drafts[:, None], 0.0)
    else:
        left = (target_probs - draft_probs).clamp(min=0.0)
    output.copy_((left * inverse_noise[_places(ends)[1]]).argmax(dim=1))
