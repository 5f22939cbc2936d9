"""The hooks in vLLM's processes: a worker extension, and a logits processor that forces tokens.

vLLM loads both by their names, from its own arguments ``worker_extension_cls`` and ``logits_processors``. The processor
works for either model runner: each has an interface of its own, and refuses a class without it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from ...evidence.bisect import inside, kinds

if TYPE_CHECKING:
    from torch import Tensor

FORCED = "fl_forced"
"""The key of a request's extra arguments."""


class BisectWorker:
    """Methods for ``LLM.collective_rpc``, mixed into the worker."""

    rank: int
    get_model: Callable[[], Any]

    def fl_bisect_switch(self, settings: str, seed: int | None, ranks: list[int] | None) -> str:
        """Switch this rank to other settings if it is among ``ranks``; see :func:`inside.switch`."""
        return inside.switch(settings, seed) if ranks is None or self.rank in ranks else ""

    def fl_bisect_watch(self, operator: str) -> None:
        """See :func:`kinds.watch`."""
        kinds.watch(operator)

    def fl_bisect_processor(self) -> float | None:
        """See :func:`inside.processor_seconds`."""
        return inside.processor_seconds()

    def fl_bisect_answer(self) -> dict[str, Any]:
        """See :func:`inside.answer`."""
        return inside.answer(self.get_model())


V2_INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
"""The V2 runner's interface; vLLM versions without it run V1 if there are logits processors."""


def _v2_interface() -> Any:
    if importlib.util.find_spec(V2_INTERFACE) is None:
        return object
    return importlib.import_module(V2_INTERFACE).LogitsProcessor


class _ForV1(AdapterLogitsProcessor):  # type: ignore[misc]  # the host is not type-checked
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[Sequence[int], Tensor], Tensor] | None:
        forced = _forced(params)
        if not forced:
            return None

        def force(generated: Sequence[int], logits: Tensor) -> Tensor:
            return _choose(logits, forced, len(generated))

        return force


class _ForV2(_v2_interface()):  # type: ignore[misc]  # the host is not type-checked
    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_len, self._slots = req_states.prompt_len, dict[int, list[int]]()

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._slots[req_idx] = _forced(sampling_params)
        return bool(self._slots[req_idx])

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        for row, (slot, place) in enumerate(zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)):
            if forced := self._slots.get(slot):
                generated = place + 1 - int(self._prompt_len.np[slot])  # negative during the prefill
                _choose(logits[row], forced, max(0, generated))
        return logits


def _forced(params: Any) -> list[int]:
    return list((params.extra_args or {}).get(FORCED) or ())


def _choose(logits: Tensor, forced: Sequence[int], step: int) -> Tensor:
    """Make only the forced token of a step possible, in place."""
    logits.fill_(float("-inf"))
    logits[forced[min(step, len(forced) - 1)]] = 0.0
    return logits


class ForcedTokens(_ForV1, _ForV2):
    """Chooses the given tokens, one per step; vLLM computes log-probabilities before this processor runs.

    The class has the interfaces of both model runners, and each runner gets an instance of its own interface.
    """

    def __new__(cls, vllm_config: Any, *of_runner: Any) -> Any:
        """Choose by the arguments: V1 passes a device and whether memory is pinned, V2 the state of its requests."""
        return (_ForV1 if len(of_runner) > 1 else _ForV2)(vllm_config, *of_runner)
