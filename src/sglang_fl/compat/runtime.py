"""SGLang's runtime context in this process: the attention backends in force, and the largest step."""

from __future__ import annotations

ATTENTION = "fl"
"""The name of our attention backend in SGLang's lists."""


def hosts_own_attention() -> list[str]:
    """Return SGLang's own attention backends in force."""
    from sglang.srt.runtime_context import attention_backends

    return sorted({*attention_backends()} - {ATTENTION})


def largest_step() -> int:
    """Return the tokens of the largest step, in a scheduler process."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or -1  # -1: prompts are not split
    return int(chunk if chunk > 0 else schedule.max_prefill_tokens)
