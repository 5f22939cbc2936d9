"""The doors into vLLM's processes: a worker extension, and a logits processor that forces tokens.

vLLM loads both by their names, from its own arguments ``worker_extension_cls`` and ``logits_processors``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from ...evidence.bisect import inside

if TYPE_CHECKING:
    from torch import Tensor

FORCED = "fl_forced"
"""The key of a request's extra arguments."""


class BisectWorker:
    """Methods for ``LLM.collective_rpc``; mixed into the worker."""

    rank: int
    get_model: Callable[[], Any]

    def fl_bisect_switch(self, policy: str, seed: int | None, ranks: list[int] | None) -> str:
        """Let another policy hold in this rank, if it is meant; see :func:`inside.switch`."""
        return inside.switch(policy, seed) if ranks is None or self.rank in ranks else ""

    def fl_bisect_answer(self) -> dict[str, Any]:
        """See :func:`inside.answer`."""
        return inside.answer(self.get_model())


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]  # the host is not type-checked
    """Chooses the given tokens, one a step; vLLM computes the log-probabilities before it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[Sequence[int], Tensor], Tensor] | None:
        forced = (params.extra_args or {}).get(FORCED)
        if not forced:
            return None

        def force(generated: Sequence[int], logits: Tensor) -> Tensor:
            token = forced[min(len(generated), len(forced) - 1)]
            chosen = logits.new_full(logits.shape, float("-inf"))
            chosen[token] = 0.0
            return chosen

        return force
