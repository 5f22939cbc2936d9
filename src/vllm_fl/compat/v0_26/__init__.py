"""vLLM 0.26: it gets the names and the answers of later versions, so that no module outside this folder knows of it.

To drop this version, delete the folder, the lines that call :func:`install`, and in ``host_facts.yaml`` the entries
with ``until: 0.32`` and the lines ``since: 0.32``.
"""

from __future__ import annotations


def install(*, triton: bool, pinned: bool, out_of_tree: bool) -> None:
    """Adapt this process, a worker before vLLM's part of it is made. Idempotent.

    Args:
        triton: a driver of Triton's serves the worker's device.
        pinned: pinned host memory helps.
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
    if not triton:
        kernels.replace_by_name()
    if not pinned:
        latent.plan_context_unpinned()
