"""A worker's workspace and model runner, which vLLM 0.26 makes in no method of their own."""

from __future__ import annotations

from typing import Any

from . import kernels, latent


def make_workspace_and_runner(worker: Any) -> None:
    """Give a worker its workspace and its model runner; in vLLM 0.26 no method of its own does only that."""
    if hasattr(worker, "_init_workspace_and_model_runner"):
        worker._init_workspace_and_model_runner()
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    if worker.device.type == "cpu":
        kernels.replace_kernels()  # 0.26 has no hook of the platform for it
        latent.offer_latent_prefill()
        latent.plan_context_unpinned()
    init_workspace_manager(worker.device, 1)
    worker.model_runner = worker._make_model_runner()
