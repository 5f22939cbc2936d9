"""Data-parallel attention without pinned memory or Triton kernels.

Each rank attends for its own requests, and all share the other layers, so SGLang gathers tokens before those layers and
returns a rank's own afterwards. It counts tokens in pinned memory unconditionally, and copies them with a Triton kernel
on every device except those that it knows to lack Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.hosting.memory.pinning import unpinned

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def prepare_mlp_sync_batch(original: Callable[..., Any], batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
    """Run SGLang's preparation of a batch, without pinning if memory cannot be pinned."""
    return (original if detect_device().pin_memory else unpinned(original))(batch, *args, **kwargs)


def memcpy(
    original: Callable[..., None], dst: Tensor, src: Tensor, dim: int, offset: Tensor, sz: Tensor, offset_src: bool
) -> None:
    """Copy ``sz`` rows from ``src`` to ``dst``, starting at ``offset`` in one of them."""
    from sglang.srt.layers.dp_attention import memcpy_cpu

    (memcpy_cpu if why_unserved() else original)(dst, src, dim, offset, sz, offset_src)
