"""Choices before SGLang captures graphs: no graph waits for the device, kernels are warm, and dispatch is frozen.

A captured graph keeps its kernels, and a failure during capture would look like a failed graph. So implementations
first prove themselves in eager batches; then the choices are fixed. SGLang captures graphs of prompts before those of
decoding, and one step fixes the choices of both.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from fl_dispatch import freeze_dispatch, get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.start.first_choices import without_graphs
from fl_dispatch.hosting.start.warm_batches import token_counts
from fl_dispatch.logger_manager import get_logger

from ..attention import attention_warm_up, indexer
from ..attention.attention_backend import ours
from ..bridge import states
from ..compat.runtime import largest_step
from ..ranks import communicator
from ..runner_state import LOADED
from . import product_warm_up

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import BaseCudaGraphRunner

logger = get_logger(__name__)


def of_layers(runner: ModelRunner) -> set[str]:
    """Return the operators of a model's layers, without attention's; those with a state have some for single tokens."""
    operators = {operator for operator, _ in LOADED.of(runner).survey.ours.values()}
    return operators | states.for_tokens(operators)


def of_attention(backend: AttentionBackend) -> set[str]:
    """Return the operators of attention, if it is ours."""
    found = ours(backend)
    if found is None:
        return set()
    lists = indexer.OPERATORS if found.operator == "mla_sparse" else ()
    return {"kv_cache_write", found.operator, *lists}


def fix(operators: Set[str], graphs: str, not_compared: str, warm_up: Callable[[], None]) -> bool:
    """Freeze the choices, if graphs can hold the operators' first choices.

    Args:
        operators: operators to capture.
        graphs: the kind of graphs, for the WARNING about implementations that graphs cannot hold.
        not_compared: the WARNING of shadow mode.
        warm_up: runs every kind of batch that may come; unnecessary once dispatch is frozen.

    Returns:
        Whether graphs can be captured.
    """
    if not _can_be_held(operators, graphs):
        return False
    manager = get_default_manager()
    if not manager.frozen:
        warm_up()
        if not _can_be_held(operators, graphs):  # an implementation that failed in a batch was replaced by another one
            return False
        communicator.check_manifest(freeze_dispatch(compiling=False))
    communicator.agree_on_tactics()
    if manager.shadow.sampling is not None:
        logger.warning(not_compared)
    return True


def _can_be_held(operators: Set[str], graphs: str) -> bool:
    impls = without_graphs(sorted(operators))
    if impls:
        named = ", ".join(f"'{impl.impl_id}' of '{impl.op_name}'" for impl in impls)
        logger.warning("%s are captured, because none can hold %s", graphs, named)
    return not impls


def warm_up(runner: BaseCudaGraphRunner, most_requests: int, buffers: Any) -> None:
    """Run the kernels of every kind of batch: attention and products, and other layers when they decode.

    Args:
        runner: the runner of either kind of graphs.
        most_requests: largest number of requests of a decoding batch; 0 if none decodes.
        buffers: SGLang's tensors of such a batch.
    """
    calls, model_runner = 0, runner.model_runner
    if (backend := ours(model_runner.attn_backend)) is not None:
        calls = attention_warm_up.warm_up(backend, model_runner)
    products = product_warm_up.warm_up(model_runner.model, largest_step(), model_runner.dtype)
    with runner.model_context():  # a router reads there whether its shared experts are among the others
        for requests in token_counts(most_requests) if most_requests else ():
            runner._dummy_run(requests, buffers=buffers)
    detect_device().synchronize()
    logger.info("operators are warm: %d calls of attention, %d of products", calls, products)
