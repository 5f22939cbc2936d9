"""The worker on a CPU: main memory as KV cache, and vLLM's V1 model runner for CPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.memory import heap, paging
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from .. import cores, environment
from ..compat import determinism, threads
from ..compilation import compile
from ..platform import config
from . import sleep
from .base import WorkerFL

logger = get_logger(__name__)

GIB = 1 << 30
LARGEST_DEFAULT_CACHE = 4 * GIB
WARM_UP_TOKENS = 8


class CPUWorkerFL(WorkerFL):
    """vLLM's worker without its CUDA parts."""

    def __init__(self, vllm_config: VllmConfig, local_rank: int, *args: Any, **kwargs: Any) -> None:
        parallel = vllm_config.parallel_config
        worker = (parallel.data_parallel_rank_local or 0) * parallel.local_world_size + local_rank
        workers, allowed = config.workers_here(vllm_config), frozenset(os.sched_getaffinity(0))
        self.fl_memory = sleep.Memory()
        cores.bind(cores.cores_for(worker, workers, allowed, os.environ))
        super().__init__(vllm_config, local_rank, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if (folder := get_settings().page_out) is not None:
            paging.check(folder)
            heap.map_buffers()
        threads.leave(gpu_worker)
        compile.leave_to_inductor(self.vllm_config, detect_device())
        super().load_model(*args, **kwargs)

    def init_device(self) -> None:
        self.device = torch.device(current_platform.device_type)
        placed = (self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend)
        with determinism.without_triton():
            init_worker_distributed_environment(self.vllm_config, *placed)
        set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            return super()._make_model_runner()
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # plain Python: needs no compiled library

        return CPUModelRunner(self.vllm_config, self.device)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache.

        The size is the user's number; otherwise enough for ``max_num_seqs`` requests of ``max_model_len``, at most 4
        GiB unless a single request needs more, within this worker's share of the available memory. vLLM fills it with
        zeros at start, so an unused part costs memory and time.
        """
        available = detect_device().memory(0)[0]
        explicit = self.cache_config.kv_cache_memory_bytes
        if explicit is None:
            explicit = environment.cache_space()
        workers = config.workers_here(self.vllm_config)
        if explicit is not None:
            if explicit > available // workers:
                asked, have = explicit / GIB, available / GIB / workers
                raise ValueError(
                    f"{asked:.1f} GiB are asked for as KV cache, but only {have:.1f} GiB are available to each worker"
                )
            return explicit
        longest = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in self.get_kv_cache_spec().values())
        share = int(available * self.cache_config.gpu_memory_utilization) // workers
        useful = min(self.scheduler_config.max_num_seqs * longest, LARGEST_DEFAULT_CACHE)
        size = min(max(useful, longest), share)
        logger.info(
            "KV cache: %.2f GiB, kv_cache_memory_bytes sets another size (one request of max_model_len needs %.3f GiB, "
            "%.1f GiB of memory are available)",
            size / GIB,
            longest / GIB,
            available / GIB,
        )
        return size

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Run one small batch, so that implementations have proven themselves before the first request.

        vLLM's dummy batch has no cache slots, so ``kv_cache_write`` is called but writes nothing. If the model is
        compiled, the batch first runs eagerly, so that implementations that fail are banned before the choices are
        fixed.
        """
        with self.fl_weights.settled():
            with compile.uncompiled(self.fl_models()):
                self._run_dummy_batch(WARM_UP_TOKENS)
            self.fl_weights.try_heads()
            self._compare_ranks()
            if compile.is_compiled(self.vllm_config):
                self._freeze()
                for tokens in compile.warm_up_sizes(self.vllm_config, WARM_UP_TOKENS):
                    self._run_dummy_batch(tokens)
        self._finish_start()
        self._page_out()
        heap.keep_buffers()
        return CompilationTimes(language_model=self.compilation_config.compilation_time, encoder=0.0)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._page_out()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        self._page_out()

    def _page_out(self) -> None:
        if (folder := get_settings().page_out) is not None:
            self.fl_weights.page_out(folder)

    def sleep(self, level: int = 1) -> None:
        """Release the cache's memory, at level 2 also the weights', except those that the user keeps."""
        if level == 2:
            kept = getattr(self.model_config, "sleep_preserve_parameter_names", ())
            self.fl_memory.give_back(sleep.WEIGHTS, sleep.weight_tensors(self.fl_models(), kept))
        self.discard((sleep.CACHE,))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate memory again; released weights are zeros until they are loaded."""
        pages_out = get_settings().page_out is not None
        if pages_out:
            heap.map_buffers()
        self.fl_memory.take(tags)
        if pages_out:
            heap.keep_buffers()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release the cache's memory without keeping its contents."""
        if sleep.CACHE in tags:
            layers = self.compilation_config.static_forward_context.values()
            self.fl_memory.give_back(sleep.CACHE, sleep.cache_tensors(layers))

    def _run_dummy_batch(self, tokens: int) -> None:
        limit = self.scheduler_config.max_num_batched_tokens
        self.model_runner._dummy_run(min(tokens, limit), force_attention=True, **self.fl_dummy_options())
