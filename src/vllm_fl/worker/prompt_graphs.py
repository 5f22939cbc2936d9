"""Graphs of prompts: sizes beyond vLLM's own, up to the size at which the device no longer waits for the host.

vLLM captures batches of up to 512 tokens. A larger one runs outside graphs, and the host launches every kernel: for a
model with many small kernels the host takes longer than the device. This module measures that on batches without
attention, which no piecewise graph holds. A user who chooses sizes (``max_cudagraph_capture_size``,
``cudagraph_capture_sizes``) gets those.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fl_dispatch.logger_manager import get_logger

from ..layers.states import StateLayer
from ..platform import config
from .warm_up import WarmableAttention

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

logger = get_logger(__name__)

PER_DOUBLING = 8
"""Number of sizes between a number of tokens and its double: from 2,048 on a batch is padded by at most an eighth."""
LEAST_STEP = 256
"""Smallest step between sizes: capturing one takes a sixth of a second, and a waiting device has time for padding."""
TIMES_THE_HOST = 2.0
"""Ratio of a batch's time to the host's launch time up to which the batch gets a graph.

Attention is also launched, outside graphs, and is not measured. The rest of a batch of 1,024 tokens of Llama-3.1-8B
takes an H100 22 ms, and its launches take the host 11 (docs/measured/gpu.md).
"""
LEAST_LIMIT = 512
"""Smaller limits are not tried separately, because a device takes hardly longer for fewer tokens."""
PART = 16
"""Graphs may take 1/16 of the memory of the KV cache."""
PART_BESIDE = 2
"""Graphs may take 1/2 of the memory that a cache of a chosen size leaves."""
POOL = 1.5
"""The estimated memory of graphs is this multiple of the memory of their largest batch."""
RUNS = 3
"""Number of measurements of a batch; the median counts."""


@dataclass(frozen=True)
class Batch:
    """The time and the memory of a batch outside graphs.

    Args:
        tokens: number of tokens.
        seconds: time from its first launch until the device finished.
        launching: seconds from the first launch to the last.
        memory: estimate of the bytes that its graphs take.
    """

    tokens: int
    seconds: float
    launching: float
    memory: int


def sizes(captured: int, most: int) -> list[int]:
    """Return numbers of tokens to capture beyond ``captured``, up to ``most`` inclusive; ascending."""
    found, size = [], captured
    while size < most:
        step = max(LEAST_STEP, (1 << size.bit_length() - 1) // PER_DOUBLING)
        size = min(most, (size // step + 1) * step)
        found.append(size)
    return found


def limits(captured: int, most: int) -> list[int]:
    """Return the largest numbers of tokens of graphs to try: doublings of ``captured``, and ``most``; ascending."""
    doubled = (captured << times for times in range(1, most.bit_length()))
    return [*(tokens for tokens in doubled if LEAST_LIMIT <= tokens < most), *([most] if captured < most else [])]


def why_none(vllm_config: VllmConfig, model: nn.Module) -> str | None:
    """Return why no graphs of prompts are captured for a model, or ``None``."""
    from vllm.config import CompilationMode, CUDAGraphMode

    from vllm import envs

    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    graphs = compilation.cudagraph_mode
    pieces = compilation.mode == CompilationMode.VLLM_COMPILE and graphs.mixed_mode() == CUDAGraphMode.PIECEWISE
    ranks_differ = parallel.data_parallel_size > 1 or parallel.pipeline_parallel_size > 1 or parallel.enable_elastic_ep
    attention = [impl for module in model.modules() if (impl := getattr(module, "impl", None)) is not None]
    reasons = [
        (not config.are_sizes_left(vllm_config), "sizes are chosen, by the user or for this model"),
        (not pieces, "no piecewise graphs are captured"),
        (compilation.max_cudagraph_capture_size in (None, 0), "no sizes are captured"),
        (vllm_config.lora_config is not None, "each size would be captured for numbers of adapters"),
        (vllm_config.speculative_config is not None, "drafting models capture all sizes too"),
        (ranks_differ, "ranks would have to agree on each batch"),
        (parallel.use_ubatching, "batches are cut in two (ubatching)"),
        # vLLM's own backends plan memory for every captured size; layers with a state were not measured.
        (not all(isinstance(impl, WarmableAttention) for impl in attention), "another backend's attention has limits"),
        (any(isinstance(module, StateLayer) for module in model.modules()), "layers have a state"),
        (vllm_config.model_config.original_max_model_len == -1, "the longest context takes all memory"),
        (envs.VLLM_ENABLE_STARTUP_PLAN, "vLLM finds its plan of a start by the sizes"),
    ]
    return next((reason for applies, reason in reasons if applies), None)


def add(
    vllm_config: VllmConfig, model: nn.Module, run: Callable[[int], object], cache: int, longest_request: int
) -> int:
    """Capture graphs of prompts if they pay. Every rank must call it.

    Call it when the model is compiled, and before the runner reads the sizes for its KV cache.

    Args:
        vllm_config: the worker's configuration; its sizes are extended.
        model: the model with its layers.
        run: runs a batch of a number of tokens, without attention.
        cache: bytes of the KV cache without such graphs.
        longest_request: bytes of the cache for a request of the maximum length.

    Returns:
        Bytes of the cache to leave for graphs: 0 if the user chose the cache's size.
    """
    from . import ranks  # configurations are read before vLLM's groups can be imported

    if reason := why_none(vllm_config, model):
        logger.info("no graphs of prompts: %s", reason)
        return 0
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    captured = compilation.max_cudagraph_capture_size
    # The scheduler makes no larger batch, and a larger dummy batch would have requests beyond the maximum length.
    most = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * vllm_config.model_config.max_model_len)
    if captured >= most:
        return 0
    chosen = vllm_config.cache_config.kv_cache_memory_bytes
    if chosen:  # PyTorch keeps the memory of the profile's batch, so that is not counted as free
        room = (torch.accelerator.get_memory_info()[0] - chosen) // PART_BESIDE
    else:
        room = min(cache // PART, cache - longest_request)
    host, best = measure(run, captured + 1).launching, None
    for tokens in limits(captured, most):
        batch = measure(run, tokens)
        logger.info(
            "a batch of %d tokens outside of graphs, without attention: %.1f ms; launching one takes the host %.1f",
            *(tokens, 1e3 * batch.seconds, 1e3 * host),
        )
        if not ranks.everywhere(batch.seconds <= TIMES_THE_HOST * host and batch.memory <= room):
            break
        best = batch
    if best is None:
        return 0
    # vLLM refuses a size that is both compiled separately and padded; graphs of decoding hold at most all requests.
    whole = (*(compilation.compile_sizes or ()), scheduler.max_num_seqs)
    more = sorted({*sizes(captured, best.tokens), *(size for size in whole if captured < size <= best.tokens)})
    compilation.cudagraph_capture_sizes = [*compilation.cudagraph_capture_sizes, *more]
    compilation.max_cudagraph_capture_size = best.tokens
    logger.info(
        "%d graphs more, for batches of up to %d tokens, where the device would wait for the host; %.2f GiB for them "
        "(max_cudagraph_capture_size in --compilation-config chooses: %d keeps to vLLM's sizes)",
        *(len(more), best.tokens, best.memory / (1 << 30), captured),
    )
    return 0 if chosen else best.memory


def measure(run: Callable[[int], object], tokens: int) -> Batch:
    """Return the median of :data:`RUNS` runs, after one that compiles kernels."""
    run(tokens)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    found = sorted(_timed(run, tokens) for _ in range(RUNS))
    held = torch.accelerator.max_memory_allocated() - before
    return Batch(tokens, *found[RUNS // 2], int(POOL * held))


def _timed(run: Callable[[int], object], tokens: int) -> tuple[float, float]:
    """Return seconds until the device has finished, and until the host has launched everything."""
    begun = time.perf_counter()
    run(tokens)
    launched = time.perf_counter()
    torch.accelerator.synchronize()
    return time.perf_counter() - begun, launched - begun
