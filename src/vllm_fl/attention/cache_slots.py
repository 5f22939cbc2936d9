"""The number of a batch's real cache slots, known while a worker runs a step of the scheduler.

vLLM marks slots to skip with -1: the padding after a step's tokens, and every slot of a dummy batch for warm-up,
capture or keeping data-parallel ranks in step. Dummy batches do not come from the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_tokens: ContextVar[int] = ContextVar("vllm_fl_step_tokens", default=0)


@contextmanager
def step(tokens: int) -> Iterator[None]:
    """Run a scheduler's step with ``tokens`` tokens in this thread in the block."""
    before = _tokens.set(tokens)
    try:
        yield
    finally:
        _tokens.reset(before)


def real(slot_mapping: Tensor) -> tuple[Tensor, bool | None]:
    """Return the slots that may be written, and the hint ``may_skip`` for them: ``False``, or ``None`` if unknown."""
    tokens = _tokens.get()
    if not tokens:
        return slot_mapping, None
    return slot_mapping if slot_mapping.shape[0] == tokens else slot_mapping[:tokens], False
