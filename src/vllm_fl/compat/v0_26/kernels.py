"""The Triton kernels of vLLM 0.26, which has no ``register_kernels``: functions are put in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...worker import rejection
from ..kernels import REJECTION_KERNELS, slot_mapping


class _Launched:
    """A function in the place of a Triton kernel, which is called as ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **constants: self._function(*arguments, *constants.values())


def _slot_mapping(*arguments: Any) -> None:
    """:func:`slot_mapping` with this version's parameters: another order, and two sizes of blocks more."""
    *before, block_size, slots, _kv_cache_block_size, _blocks_per_kv_block = arguments[:10]
    slot_mapping(*before, slots, block_size, *arguments[10:])


def replace_by_name() -> None:
    """Replace the kernels that the V1 model runner launches."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker import block_table
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._postprocess_triton = lambda runner: None
    block_table._compute_slot_mapping_kernel = _Launched(_slot_mapping)
    for name in REJECTION_KERNELS:
        setattr(rejection_sampler, name, _Launched(getattr(rejection, name)))
