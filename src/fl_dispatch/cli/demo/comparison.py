"""Hugging Face's answer to the same request: the same tokens, or in half precision as near a distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..half_precision import COMPARED, EXPERTS, LARGEST, MEAN, distances, exact, table
from .engines import Generated, Request

if TYPE_CHECKING:
    from torch import Tensor


def compare(family: str, request: Request, generated: Generated) -> tuple[bool, str]:
    """Whether an engine's result is right, and what was compared."""
    return _by_scores(family, request, generated) if request.scored else _by_tokens(request, generated)


def _by_tokens(request: Request, generated: Generated) -> tuple[bool, str]:
    import torch

    network = _network(request, torch.float32)
    for prompt, tokens in zip(generated.prompts, generated.tokens, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.tokens,
                min_new_tokens=request.tokens,
                do_sample=False,
                eos_token_id=None,
            )
        if output[0, len(prompt) :].tolist() != tokens:
            return False, "tokens equal to Hugging Face's: NO"
    return True, "tokens equal to Hugging Face's: yes"


def _by_scores(family: str, request: Request, generated: Generated) -> tuple[bool, str]:
    """In half precision a close choice may fall the other way, so log-probabilities after every token are compared."""
    import torch

    single, half = (
        exact(_network(request, dtype), generated.sequences)[0]
        for dtype in (torch.float32, getattr(torch, request.dtype))
    )
    compared = COMPARED if family in EXPERTS else 1.0
    mean, largest = distances(table(generated.rows), single, half, compared)
    right = mean <= MEAN and largest <= LARGEST
    same, total = _first_choices(generated, single)
    return right, (
        f"{same} of {total} tokens are Hugging Face's in float32, and "
        f"log-probabilities as near to float32 as Hugging Face's {request.dtype}: {'yes' if right else 'NO'} "
        f"(mean difference {mean:.2f} of its, at most {MEAN}; largest {largest:.2f}, at most {LARGEST})"
    )


def _first_choices(generated: Generated, single: Tensor) -> tuple[int, int]:
    """Count the generated tokens that are a model's first choice after the tokens before them; and all of them.

    Args:
        generated: by an engine.
        single: the model's log-probabilities after every token but the last of each sequence.
    """
    import torch

    rows = torch.split(single.argmax(dim=-1), [len(sequence) - 1 for sequence in generated.sequences])
    same = sum(
        ours == theirs
        for part, tokens in zip(rows, generated.tokens, strict=True)
        for ours, theirs in zip(tokens, part[-len(tokens) :].tolist(), strict=True)
    )
    return same, sum(map(len, generated.tokens))


def _network(request: Request, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(request.model, dtype=dtype, attn_implementation="eager").eval()
