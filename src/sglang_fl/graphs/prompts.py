"""Hooks of SGLang's runner of prompt graphs: pieces hold our operators, and attention runs eagerly between them.

A prompt graph has one piece more than the model has attention layers: SGLang ends a piece in ``RadixAttention``, calls
the attention backend for the tokens without padding, and begins the next piece. After the last layer the step is eager
again. So a batch is described like an eager step's, and attention operators may run code that graphs cannot hold.
SGLang asks no platform for the class of this runner, so its methods are hooked.

SGLang captures these graphs before those of decoding, with no eager step before them. So the choices of both are fixed
here, and our own batch is the first forward pass, which is watched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fl_dispatch import get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.start.warm_batches import token_counts
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings
from fl_dispatch.shadow.origin import is_watching

from ..bridge.states import OPERATORS as STATES
from ..layers import first_pass
from ..runner_state import PROMPT_GRAPHS, PromptGraphs
from . import choices

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

logger = get_logger(__name__)

NONE = "no graphs of prompts"
NOT_COMPARED = (
    "shadow: SGLang reads prompts from captured graphs and runs only attention eagerly, so other calls of "
    "prompts are compared in batches that no graph holds (--cuda-graph-backend-prefill disabled: all are)"
)


def capture(original: Callable[..., Any], prompts: PrefillCudaGraphRunner) -> None:
    """Capture pieces for each number of tokens, unless the policy's first implementation can be in no graph."""
    graphs = PromptGraphs()
    PROMPT_GRAPHS.give(prompts, graphs)
    operators = choices.of_layers(prompts.model_runner)
    if operators & STATES:  # a piece would keep the captured batch's slots and lengths
        logger.info("%s are captured, because layers with a state read prompts eagerly", NONE)
        return
    if choices.fix(operators, NONE, NOT_COMPARED, partial(_warm_up, prompts)):
        original(prompts)
        graphs.captured = True


def can_run_graph(original: Callable[..., Any], prompts: PrefillCudaGraphRunner, forward_batch: ForwardBatch) -> bool:
    """Whether a batch can run in the pieces: only if they were captured, no call is checked, and SGLang agrees."""
    held = PROMPT_GRAPHS.of(prompts).captured and not is_watching(get_default_manager().state)
    return held and bool(original(prompts, forward_batch))


def execute(original: Callable[..., Any], prompts: PrefillCudaGraphRunner, *args: Any, **kwargs: Any) -> Any:
    """Run the pieces, and count that."""
    PROMPT_GRAPHS.of(prompts).replays += 1
    return original(prompts, *args, **kwargs)


@torch.no_grad()
def _warm_up(prompts: PrefillCudaGraphRunner) -> None:
    """Run every kernel: those needed before graphs of decoding, and layers that read prompts."""
    model_runner = prompts.model_runner
    requests = (prompts._widest_decode_rows() or 0) if model_runner.is_generation else 0
    buffers = prompts._alloc_dummy_decode_buffers(requests, allocate_logits_buffer=False) if requests else None
    choices.warm_up(prompts, requests, buffers)
    with prompts.model_context():
        for tokens in token_counts(prompts.max_num_tokens):
            first_pass.watched(model_runner, partial(prompts._run_dummy_forward, tokens), inside=prompts.layer_model)
    detect_device().synchronize()
    first_pass.judge(first_pass.missed(model_runner), get_settings().policy.strict)
