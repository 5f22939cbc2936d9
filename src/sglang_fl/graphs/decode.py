"""SGLang's own runner of decode graphs over our operators; the choices are fixed before the capture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from . import choices

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

NONE = "no graphs of decoding"
NOT_COMPARED = (
    "shadow: SGLang's decoding runs from captured graphs, and none of its steps runs eagerly, so its calls are "
    "compared in batches that no graph holds alone (--cuda-graph-backend-decode disabled: all are)"
)


class GraphRunnerFL(DecodeCudaGraphRunner):
    """SGLang's runner; if graphs cannot hold the policy's first choices, it logs that and captures nothing.

    Attributes:
        fl_captured: whether graphs were captured.
        fl_replays: steps that replayed a graph.
    """

    fl_captured = False
    fl_replays = 0

    def capture(self) -> None:
        """Capture a graph for each size of a batch."""
        operators = choices.of_layers(self.model_runner) | choices.of_attention(self.attn_backend)
        if choices.fix(operators, NONE, NOT_COMPARED, self._warm_up):
            super().capture()
            self.fl_captured = True

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        return self.fl_captured and bool(super().can_run_graph(forward_batch))

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        self.fl_replays += 1
        return super().execute(*args, **kwargs)

    @torch.no_grad()
    def _warm_up(self) -> None:
        buffers = self.buffers
        buffers.seq_lens.fill_(self.seq_len_fill_value)  # SGLang's runners share them, and others write zeros
        buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        choices.warm_up(self, self.max_bs, buffers)
