"""The worker on an accelerator: vLLM's own model runners (V1 and V2), memory profile, compilation and graphs.

vLLM compiles in the first full batch, when it measures memory, and captures graphs once the KV cache exists. So the
choices are fixed before the compilation, after some eager batches in which implementations prove themselves. Those
batches have no KV cache: attention is first called with fixed choices (``warm_up``), and an error in it ends the start.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes

from fl_dispatch import successors
from fl_dispatch.devices import DeviceSpec, detect_device
from fl_dispatch.hosting.start import aten
from fl_dispatch.logger_manager import get_logger

from ..compat import determinism, device_memory, library, streams
from ..compilation import compile
from ..damage import detection as damage
from ..platform import config
from . import prompt_graphs, ranks, warm_up
from .base import WorkerFL
from .communicator import any_communicator

logger = get_logger(__name__)


class GPUWorkerFL(WorkerFL):
    """vLLM's GPU worker."""

    def init_device(self) -> None:
        pooled = self.model_config.enable_sleep_mode or self.model_config.enable_cumem_allocator
        if current_platform.is_out_of_tree():
            library.do_without_library(any_communicator)
            self.fl_pools = pooled
        if self.fl_pools:
            device_memory.lend_allocator()
        if pooled and self.vllm_config.lora_config is not None:
            device_memory.keep_adapters()
        device = detect_device()
        if not device.is_foreign:
            determinism.choose_blas()
            super().init_device()
            return
        streams.lend_names(device)
        self._init_foreign_device(device)

    def _init_foreign_device(self, device: DeviceSpec) -> None:
        """Take vLLM's start-up steps for ``cuda`` devices on a device of any type."""
        parallel = self.parallel_config
        if parallel.distributed_executor_backend not in ("ray", "external_launcher"):
            replica = parallel.data_parallel_rank_local or 0
            self.local_rank += replica * parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        if self.local_rank >= device.device_count():
            raise ValueError(
                f"rank {self.local_rank} of this machine has no device: {device.name} has {device.device_count()}"
            )
        self.device = torch.device(device.place(self.local_rank))
        current_platform.set_device(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)  # after the collectives took theirs
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        self._init_workspace_and_model_runner()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache that vLLM measures, less those for graphs of prompts; compile the model."""
        with self.fl_weights.settled():
            with compile.uncompiled(self.fl_models()):
                single, *others = warm_up.token_counts(self.vllm_config)
                if config.has_experts(self.vllm_config):  # a prefetched weight would not survive their reads
                    self._run_batch_without_cache(single)
                else:
                    with successors.recorded():
                        self._run_batch_without_cache(single)
                    if successors.known():
                        logger.info("%d products know the weight that the next one reads", successors.known())
                        others.append(single)  # now they run, in kernels compiled before a graph holds them
                for tokens in others:
                    self._run_batch_without_cache(tokens)
            self._compare_ranks()
            captured = self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
            if compile.is_compiled(self.vllm_config) or captured:
                self._freeze()
            room = super().determine_available_memory()
            taken = self._add_prompt_graphs(room)
            if taken:
                self.available_kv_cache_memory_bytes -= taken  # the number in vLLM's advice at the end of a start
            return room - taken

    def _add_prompt_graphs(self, room: int) -> int:
        """Return the bytes to leave for graphs of prompts."""
        # vLLM keeps layers of several kinds in pages of one size, so each may take as much as the largest.
        specs = self.model_runner.get_kv_cache_spec().values()
        needs = [spec.max_memory_usage_bytes(self.vllm_config) for spec in specs]
        longest_request = len(needs) * max(needs, default=0)
        return prompt_graphs.add(self.vllm_config, self.fl_models(), self._run_drawn_batch, room, longest_request)

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Capture the graphs, and run vLLM's warm-up before it serves."""
        with self.fl_weights.settled():
            calls = warm_up.attention(self.fl_models(), self.vllm_config)
            logger.info("attention is warm: %d calls", calls)
            if self._makes_logits():
                damage.warm_up(self.model_config, self.device, damage.ONE_PASS.find(self.model_runner))
                if self.vllm_config.lora_config is not None:
                    from ..layers import lora

                    lora.warm_up_logits(self.get_model(), self.model_config.get_hidden_size(), self.model_config.dtype)
            if runs := warm_up.states(self.get_model(), self.vllm_config):
                logger.info("layers with a state are warm: %d runs", runs)
            if aten.is_active():
                self._warm_up_replaced()
            times = super().compile_or_warm_up_model()
        self._finish_start()
        return times

    def _get_cudagraph_capture_context(self) -> AbstractContextManager[None]:
        ranks.agree_on_tactics()  # vLLM has warmed its kernels, and graphs keep theirs
        return super()._get_cudagraph_capture_context()

    def _warm_up_replaced(self) -> None:
        """Run batch sizes for which FlagGems' ATen operators may run, including the projection to the vocabulary."""
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        if not sizes or self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            sizes = warm_up.token_counts(self.vllm_config)
        model, width = self.get_model(), self.model_config.get_hidden_size()
        if self._makes_logits():
            for size in sorted({min(size, self.scheduler_config.max_num_seqs) for size in sizes}):
                if self.vllm_config.lora_config is not None:
                    from ..layers import lora

                    lora.forget_batch(self.model_runner, size)
                model.compute_logits(torch.zeros(size, width, dtype=self.model_config.dtype, device=self.device))
        for size in sizes:  # timing has ended when vLLM captures them
            self._run_batch_without_cache(size)

    def shutdown(self) -> None:
        super().shutdown()
        if self.fl_pools:
            device_memory.release()

    def _makes_logits(self) -> bool:
        generates = self.model_config.runner_type != "pooling" and hasattr(self.get_model(), "compute_logits")
        return generates and get_pp_group().is_last_rank

    def _run_drawn_batch(self, tokens: int) -> None:
        """Run a batch of random tokens, so that they go to experts as a prompt's do."""
        self._run_batch_without_cache(tokens, skip_eplb=True, randomize_inputs=True)

    def _run_batch_without_cache(self, tokens: int, **options: bool) -> None:
        options |= {"skip_attn": True} if self.use_v2_model_runner else self.fl_dummy_options()
        self.model_runner._dummy_run(tokens, is_profile=True, **options)
