"""The worker: one process with a device, a model, and the dispatch core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from fl_dispatch import freeze_dispatch, get_default_manager, oplist
from fl_dispatch.device import detect_device
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from . import compat, compile, config, distributed, kv_layout, layers, ranks, startup

logger = get_logger(__name__)

GIB = 1 << 30
LARGEST_DEFAULT_CACHE = 4 * GIB
WARM_UP_TOKENS = 8


class WorkerFL(Worker):
    """vLLM's worker without its CUDA parts, on the V1 model runner for the CPU."""

    fl_counts_before: Mapping[str, int]

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        compat.silence_accelerator()
        startup.adopt(vllm_config.additional_config)
        startup.activate()
        layers.register(get_settings())
        kv_layout.choose(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    # -- start-up -----------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        self.device = torch.device(current_platform.device_type)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        compat.make_workspace_and_runner(self)

    def _make_model_runner(self) -> Any:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # plain Python: needs no compiled library

        if self.vllm_config.lora_config is not None:
            from .lora import LoRAModelRunner

            return LoRAModelRunner(self.vllm_config, self.device)
        return CPUModelRunner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return nullcontext()  # vLLM's pool is sleep mode's, for CUDA

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.get_model()
        layers.bind_scopes(model)
        get_default_manager().warn_of_unmatched_scopes()
        self.fl_survey = layers.survey(model)
        logger.info("%s", self.fl_survey.describe())
        self.fl_survey.refuse_native_run(get_settings())
        oplist.record(get_default_manager(), get_settings(), self.rank if self.parallel_config.world_size > 1 else None)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes for the KV cache.

        What the user says; else what ``max_num_seqs`` requests of ``max_model_len`` can use, at most 4 GiB unless a
        single one needs more, within this worker's share of the available memory. vLLM fills it with zeros at start,
        so an unused part costs real memory, and time.
        """
        available = detect_device().memory(0)[0]
        explicit = self.cache_config.kv_cache_memory_bytes
        if explicit is None:
            explicit = config.cache_space()
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

        vLLM's dummy batch has no cache slots, so ``kv_cache_write`` is called but writes nothing. Where the model is
        compiled, the batch runs eagerly first: what fails there is out before the choices are fixed.
        """
        with compile.uncompiled(self.get_model()):
            self._run_dummy_batch(WARM_UP_TOKENS)
        several = get_world_group().world_size > 1
        if several:
            ranks.refuse_divergence(ranks.same_layers(self.model_config))
        if compile.is_compiled(self.vllm_config):
            self._freeze_and_compile()
        get_default_manager().lockstep = several
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=self.compilation_config.compilation_time, encoder=0.0)

    def _run_dummy_batch(self, tokens: int) -> None:
        limit = self.scheduler_config.max_num_batched_tokens
        self.model_runner._dummy_run(min(tokens, limit), force_attention=True)

    def _freeze_and_compile(self) -> None:
        model, manifest = self.get_model(), freeze_dispatch()
        ranks.refuse_other_manifest(manifest, ranks.same_layers(self.model_config))
        compile.enter_cache_key(self.vllm_config, manifest.hash)
        layers.bind_scopes(model)  # now to the implementations themselves
        self.fl_counts_before = compile.counts()
        compile.start(model, self.vllm_config)
        for tokens in compile.warm_up_sizes(self.vllm_config, WARM_UP_TOKENS):
            self._run_dummy_batch(tokens)
        logger.info("compiled: %s", ", ".join(f"{name} {value}" for name, value in self._compiled().items()))

    def _compiled(self) -> dict[str, Any]:
        return compile.report(self.vllm_config, self.fl_counts_before)

    # -- questions from outside, through LLM.collective_rpc -----------------------------------------------------------

    def fl_set_counting(self, on: bool = True) -> None:
        """Count calls from now on, starting at zero, or stop. Of a compiled graph only opaque calls are seen."""
        manager = get_default_manager()
        manager.set_counting(on)
        manager.reset_counts()
        if manager.frozen:
            layers.bind_scopes(self.get_model(), untraced_only=True)

    def fl_report(self) -> dict[str, Any]:
        """What runs in this process, as plain data that vLLM can send between processes.

        ``settings`` and ``policy`` are their JSON, with the origin of each value; ``counts`` is ``"operator
        implementation"`` → calls; ``decisions`` is operator → what ``fl explain --json`` prints; ``layers`` and
        ``native_layers`` are class name → how many run our forward, and vLLM's own; ``communication`` is group →
        collective → calls. For a compiled model ``compiled`` says what was done, and ``manifest`` what was fixed.
        """
        manager = get_default_manager()
        manifest = manager.freezer.manifest
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            **startup.pack(),
            "counts": {" ".join(key): calls for key, calls in sorted(manager.call_counts().items()) if calls},
            "decisions": {op: manager.explain(op).as_data() for op in manager.registry.list_operators()},
            "failed": {op: sorted(ids) for op, ids in manager.get_failed_impls().items()},
            "layers": {name: count for name, (_, count) in self.fl_survey.ours.items()},
            "native_layers": self.fl_survey.native,
            "attention": self.fl_survey.attention,
            "communication": distributed.report(),
            "compiled": self._compiled() if compile.is_compiled(self.vllm_config) else None,
            "manifest": None if manifest is None else manifest.as_data(),
        }
