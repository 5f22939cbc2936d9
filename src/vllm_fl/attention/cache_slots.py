"""The number of a batch's real cache slots; it is known while a worker runs a step of the scheduler's.

vLLM marks slots to skip with -1: the padding behind a step's tokens, and every slot of a batch that it makes up to warm
up, to capture or to keep data-parallel ranks in step. Made-up batches do not come from the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_tokens: ContextVar[int] = ContextVar("vllm_fl_step_tokens", default=0)


@contextmanager
def step(tokens: int) -> Iterator[None]:
    """Inside, the scheduler's step with ``tokens`` tokens runs in this thread."""
    before = _tokens.set(tokens)
    try:
        yield
    finally:
        _tokens.reset(before)


def real(slot_mapping: Tensor) -> tuple[Tensor, bool | None]:
    """The slots that may be written, and the hint ``may_skip`` for them: ``False``, or ``None`` if it is unknown."""
    tokens = _tokens.get()
    if not tokens:
        return slot_mapping, None
    return slot_mapping if slot_mapping.shape[0] == tokens else slot_mapping[:tokens], False
