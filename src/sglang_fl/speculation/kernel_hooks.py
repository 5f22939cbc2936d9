"""SGLang's functions that start kernels for speculation, and our forms of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.layers.attribute import replaced

from ..compat import native_kernels
from ..compat.native_kernels import unless_triton
from . import BY_LOOK_UP, attention, forms, serves

KERNELS = "sglang.kernels.ops.speculative"
UTILITIES = "sglang.srt.speculative.spec_utils"
EAGLE = "sglang.srt.speculative.eagle_utils"
FACTORY = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
WORKER = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker"

COMPILED = "sgl_kernel"
"""SGLang's kernel library, compiled for GPUs, with the kernel that reads trees of N-grams."""


def _always(form: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a kernel that SGLang compiles with NVIDIA's compiler at its first call, on any device."""
    return lambda original, *args, **kwargs: form(*args, **kwargs)


def move_accepted(
    original: Callable[..., None], batch: Any, accept_index: Tensor, num_correct_drafts: Tensor, allocator: Any
) -> None:
    """Move accepted tokens of a tree to the first slots of their drafts; those of a chain are already there."""
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_eagle_topk in (None, 1):
        return
    target = batch.out_cache_loc.view(len(accept_index), -1)[:, : accept_index.shape[1]]
    gained = torch.arange(accept_index.shape[1], device=target.device) <= num_correct_drafts[:, None]
    source = torch.where(gained, batch.out_cache_loc[accept_index.clamp(min=0).long()], target)
    allocator.get_kvcache().move_kv_cache(target.flatten(), source.flatten())


def share_weights(original: Callable[[Any], None], worker: Any) -> None:
    """Let a draft model share the target's embedding and head; some models wait for CUDA then, on any device."""
    if torch.cuda.is_available():
        original(worker)
        return
    with replaced(torch.cuda, synchronize=detect_device().synchronize):  # SGLang names no device
        original(worker)


HOOKED: tuple[tuple[str, Callable[..., Any]], ...] = (
    (f"{KERNELS}.spec_tree.build_tree_kernel_efficient_func", _always(forms.build_tree)),
    (f"{KERNELS}.spec_tree.verify_tree_greedy_func", _always(forms.verify_greedy)),
    (f"{KERNELS}.reject_sampling.chain_speculative_sampling_triton", unless_triton(forms.sample_by_rejection)),
    (f"{KERNELS}.row_argmax.row_argmax", unless_triton(forms.best)),
    (f"{KERNELS}.cache_locs.assign_draft_cache_locs_contiguous_func", unless_triton(forms.slots_of_drafts)),
    (f"{KERNELS}.eagle.fill_bonus_tokens_func", unless_triton(forms.last_accepted)),
    ("sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func", unless_triton(forms.write_slots)),
    (f"{UTILITIES}.move_accept_tokens_to_target_kvcache", move_accepted),
    (f"{FACTORY}._create_backend", attention.create_backend),
    (f"{WORKER}.init_lm_head", share_weights),
)
"""Targets of hooks around functions → our functions."""

SUPPLIED: dict[str, Callable[..., Any]] = {
    "tree_speculative_sampling_target_only": forms.sample_target_only,
    "top_k_renorm_prob": forms.keep_top_k,
    "top_p_renorm_prob": forms.keep_top_p,
}
"""Names in :data:`EAGLE` that are ``None`` on a device without SGLang's kernel, so that no hook finds them.

On NVIDIA GPUs they need NVIDIA's compiler, and FlashInfer.
"""


def prepare(algorithm: str) -> None:
    """Give SGLang the kernels for which it has no function, before it makes the worker of an algorithm.

    Raises:
        ValueError: SGLang has replaced the user's algorithm by another one, which is not served.
    """
    if not serves(algorithm):
        raise ValueError(f"sglang_fl does not support speculative decoding with '{algorithm}' yet")
    module = importlib.import_module(EAGLE)
    for name, form in SUPPLIED.items():
        setattr(module, name, form)
    if algorithm == BY_LOOK_UP:
        with stand_in():
            reader = importlib.import_module(f"{KERNELS}.reconstruct_tree")
        reader.reconstruct_indices_from_tree_mask = forms.read_chain  # type: ignore[attr-defined]


@contextmanager
def stand_in() -> Iterator[None]:
    """Replace :data:`COMPILED` by an empty library while SGLang imports it; its GPU code does not run."""
    if COMPILED in sys.modules or native_kernels.start_triton():
        yield
        return
    library, part = ModuleType(COMPILED), ModuleType(f"{COMPILED}.speculative")
    part.reconstruct_indices_from_tree_mask = forms.read_chain  # type: ignore[attr-defined]
    sys.modules |= {library.__name__: library, part.__name__: part}
    try:
        yield
    finally:
        for module in (library, part):
            del sys.modules[module.__name__]
