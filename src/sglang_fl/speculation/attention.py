"""Attention of a draft model: our backend for its prompts, and another one for each token drafted in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..attention import attention_backend
from ..compat.runtime import ATTENTION

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory


class DraftSteps:
    """The backends of one step of drafting: one for each token but the last, after which no model runs.

    Attributes:
        attn_backends: the backends, which SGLang activates one after the other.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: ModelRunner, tokens: int, branches: int) -> None:
        self.branches = branches
        self.attn_backends = [attention_backend.create(runner) for _ in range(tokens - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Describe the batch of each token: the last drafted one is also in the cache."""
        for number, backend in enumerate(self.attn_backends):
            backend.describe_draft(forward_batch, number + 1, self.branches)


def create_backend(
    original: Callable[..., Any],
    factory: DraftBackendFactory,
    backend_name: str,
    backend_map: Mapping[str, Callable[[], tuple[str, Any]]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return SGLang's choice among the backends that it knows, including ours."""
    runner, steps = factory.draft_model_runner, kwargs.get("stamps_children", False)
    sizes = factory.speculative_num_steps, factory.topk
    make = (lambda: DraftSteps(runner, *sizes)) if steps else (lambda: attention_backend.create(runner))
    return original(factory, backend_name, {**backend_map, ATTENTION: lambda: (ATTENTION, make())}, *args, **kwargs)
