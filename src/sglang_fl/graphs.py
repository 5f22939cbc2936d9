"""SGLang's own runner of decode graphs over our operators: choices are warmed up and frozen before it captures.

A captured graph goes on with what it holds, and a failure during capture could not be told from a failed graph. So
implementations prove themselves in eager batches first; what runs then is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from fl_dispatch import freeze_dispatch, get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.first_choices import without_graphs
from fl_dispatch.hosting.warm_batches import token_counts
from fl_dispatch.logger_manager import get_logger

from . import attention_warm_up, distributed, product_warm_up
from .attention import ours
from .config import largest_step
from .loaded import LOADED

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = get_logger(__name__)

NOT_COMPARED = (
    "shadow: SGLang's decoding runs from captured graphs, and none of its steps runs eagerly, so only calls of prompts "
    "and of batches that no graph holds are compared (--cuda-graph-backend-decode disabled: all are)"
)


class GraphRunnerFL(DecodeCudaGraphRunner):
    """SGLang's runner; it captures nothing, and says so, if what comes first in the policy can be in no graph.

    Attributes:
        fl_captured: whether graphs were captured.
        fl_replays: steps that replayed one.
    """

    fl_captured = False
    fl_replays = 0

    def capture(self) -> None:
        """Capture a graph for each size of a batch."""
        if self._can_be_held():
            self._warm_up()
            if self._can_be_held():  # what failed in a batch has left its place to another implementation
                distributed.check_manifest(freeze_dispatch(compiling=False))
                if get_default_manager().shadow.sampling is not None:
                    logger.warning(NOT_COMPARED)
                super().capture()
                self.fl_captured = True

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        return self.fl_captured and bool(super().can_run_graph(forward_batch))

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        self.fl_replays += 1
        return super().execute(*args, **kwargs)

    def _can_be_held(self) -> bool:
        operators = {operator for operator, _ in LOADED.of(self.model_runner).survey.ours.values()}
        if (backend := ours(self.attn_backend)) is not None:
            operators |= {"kv_cache_write", backend.operator}
        impls = without_graphs(sorted(operators))
        if impls:
            named = ", ".join(f"'{impl.impl_id}' of '{impl.op_name}'" for impl in impls)
            logger.warning("no graphs are captured, because none can hold %s", named)
        return not impls

    @torch.no_grad()
    def _warm_up(self) -> None:
        """Meet the kernels of every kind of batch: attention and products, other layers where they decode."""
        calls, model_runner = 0, self.model_runner
        if (backend := ours(self.attn_backend)) is not None:
            calls = attention_warm_up.warm_up(backend, model_runner)
        products = product_warm_up.warm_up(model_runner.model, largest_step(), model_runner.dtype)
        buffers = self.buffers
        buffers.seq_lens.fill_(self.seq_len_fill_value)  # SGLang's runners share them, and others write zeros
        buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        with self.model_context():  # a router reads there whether its shared experts are among the others
            for requests in token_counts(self.max_bs):
                self._dummy_run(requests, buffers=buffers)
        detect_device().synchronize()
        logger.info("operators are warm: %d calls of attention, %d of products", calls, products)
