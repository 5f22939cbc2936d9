"""The worker that makes several steps of the model per scheduler call (``VLLM_FL_STEPS``).

SGLang gives a request several cache slots and several tokens per scheduler call only under an algorithm for drafts. The
algorithm here drafts nothing: its worker decodes several times. The model runner knows of no algorithm, so its graphs,
sampling and attention are the ones for decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec
from torch import Tensor

from fl_dispatch.hosting.pace import Pace
from fl_dispatch.settings import get_settings

from ..speculation.several_steps import MOST, NAME, largest
from . import damage

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs


class LastTokens(SpecInput):
    """Each request's last token, which the next step reads.

    Args:
        tokens: token ids of int64, ``[requests]``.
    """

    def __init__(self, tokens: Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.tokens = tokens

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: Any = None) -> None:
        self.tokens = self.tokens[new_indices]

    def merge_batch(self, spec_info: LastTokens) -> None:
        self.tokens = torch.cat((self.tokens, spec_info.tokens))


class StepsAlgorithm(CustomSpecAlgo):
    """An entry of SGLang's registry, with what the scheduler asks beyond the registry's own class."""

    create_future_map = SpeculativeAlgorithm.create_future_map

    def create_worker(self, server_args: ServerArgs) -> type:
        return StepsWorker

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False


class StepsWorker(BaseSpecWorker):
    """The worker that SGLang's scheduler calls in the place of the model's.

    Attributes:
        made: number of steps → number of scheduler calls that made them.
    """

    draft_worker = None

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._target_worker = target_worker
        target_worker.model_runner.spec_algorithm = SpeculativeAlgorithm.NONE
        self.pace = Pace(get_settings().steps_ms / 1e3)
        self.made: dict[int, int] = {}

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Read prompts, or decode several times.

        The scheduler restores the batch afterwards.
        """
        last, batch.spec_info, batch.spec_algorithm = batch.spec_info, None, SpeculativeAlgorithm.NONE
        if not batch.forward_mode.is_decode():
            self.pace.begin(0)
            result = self.target_worker.forward_batch_generation(batch)
            result.next_draft_input = LastTokens(result.next_token_ids.long())
            result.new_seq_lens = batch.seq_lens
            return result
        most = MOST.find(batch) or 1
        steps = self._agreed(self.pace.fitting(most))
        self.pace.begin(steps)
        self.made[steps] = self.made.get(steps, 0) + 1
        results = self._decode(batch, last.tokens, steps)
        return _joined(results, batch)

    def _agreed(self, steps: int) -> int:
        """Return the first rank's number of steps, because each rank measures its own time."""
        here = get_parallel()
        if here.tp_size == 1:
            return steps
        number, group = torch.tensor(steps), here.tp_group
        torch.distributed.broadcast(number, group.ranks[0], group.cpu_group)
        return int(number)

    def _decode(self, batch: ScheduleBatch, tokens: Tensor, steps: int) -> list[GenerationBatchResult]:
        """Decode ``steps`` times. ``batch`` holds the last step's inputs afterwards."""
        before, before_cpu, rows = batch.seq_lens, batch.seq_lens_cpu, batch.req_to_token_pool.req_to_token
        results = []
        for step in range(steps):
            batch.input_ids = tokens
            batch.out_cache_loc = rows[batch.req_pool_indices, before + step].long()
            batch.seq_lens = batch.orig_seq_lens = before + step + 1
            batch.seq_lens_cpu, batch.seq_lens_sum = before_cpu + step + 1, None
            results.append(self.target_worker.forward_batch_generation(batch))
            tokens = results[-1].next_token_ids.long()
        return results


def _joined(results: list[GenerationBatchResult], batch: ScheduleBatch) -> GenerationBatchResult:
    """Return the last step's result with the tokens and log-probabilities of all steps, request by request."""
    steps, last = len(results), results[-1]
    outputs = [result.logits_output for result in results]
    tokens = torch.stack([result.next_token_ids for result in results], 1)
    last.next_draft_input = LastTokens(tokens[:, -1].long())
    last.next_token_ids = tokens.flatten()
    last.accept_lens = torch.full((len(tokens),), steps, dtype=torch.int32, device=tokens.device)
    last.new_seq_lens = batch.seq_lens
    last.speculative_num_draft_tokens = last.num_non_draft_tokens_per_req = steps
    damage.join(outputs)
    if batch.return_logprob:
        _join_log_probabilities(outputs)
    return last


def _join_log_probabilities(outputs: list[LogitsProcessorOutput]) -> None:
    """Write all steps' log-probabilities to the last output, in the order that SGLang reads: steps of a request."""
    last = outputs[-1]
    last.next_token_logprobs = torch.stack([output.next_token_logprobs for output in outputs], 1)
    for field in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
        "next_token_token_ids_logprobs_idx",
    ):
        values = [getattr(output, field) for output in outputs]
        if values[-1]:
            setattr(last, field, [row for rows in zip(*values, strict=True) for row in rows])


def register() -> None:
    """Add the algorithm to SGLang's registry if several steps are asked for."""
    if largest() > 1 and get_spec(NAME) is None:
        SpeculativeAlgorithm.register(NAME, spec_class=StepsAlgorithm)(lambda server_args: StepsWorker)
