"""vLLM 0.26: it gets the names and the answers of later versions, so that no module outside this folder knows of it.

Whoever drops this version deletes the folder, the lines that call :func:`install`, and the facts in ``host_facts``.
"""

from __future__ import annotations

from .facts import FACTS

__all__ = ["FACTS", "install"]


def install(torch_type: str, *, out_of_tree: bool) -> None:
    """Adapt this process, a worker before vLLM's part of it is made. Idempotent.

    Args:
        torch_type: PyTorch's type of the worker's device.
        out_of_tree: the platform is no subclass of vLLM's own for this device.
    """
    from . import attention, kernels, latent, linear, worker

    linear.fix_product_when_made()
    worker.give_runner_a_method()
    attention.answer_by_shape()
    latent.describe_chunks()
    if out_of_tree:
        latent.offer_prefill()
        worker.warm_up_block_table()
    if torch_type == "cpu":
        kernels.replace_by_name()
        latent.plan_context_unpinned()
