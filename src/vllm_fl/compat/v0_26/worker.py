"""The worker of vLLM 0.26: no method of its own makes only workspace and model runner, or warms up by a registry."""

from __future__ import annotations

from typing import Any


def _init_workspace_and_model_runner(worker: Any) -> None:
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(worker.device, 1)
    worker.model_runner = worker._make_model_runner()


def give_runner_a_method() -> None:
    """Add the method that later versions have."""
    from vllm.v1.worker.gpu_worker import Worker

    Worker._init_workspace_and_model_runner = _init_workspace_and_model_runner


class _BlockTableKernels:
    """In the place of the V1 model runner's registry of kernels to compile beforehand."""

    def __get__(self, runner: Any, owner: type | None = None) -> _BlockTableKernels:
        self.runner = runner
        return self

    def warmup(self) -> None:
        from vllm.model_executor.warmup.v1_block_table_warmup import warm_v1_block_table_kernels

        warm_v1_block_table_kernels(self.runner.device, self.runner.scheduler_config.max_num_batched_tokens)


def warm_up_block_table() -> None:
    """Give the V1 model runner a registry of the kernels of its block table."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.jit_warmup_registry = _BlockTableKernels()
