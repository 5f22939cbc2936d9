"""Data-parallel attention where no memory can be pinned, or no Triton kernel runs.

Each rank attends for requests of its own, and all of them share the other layers, so SGLang gathers tokens before those
and takes a rank's own back afterwards. It counts tokens in pinned memory without asking, and copies them by a Triton
kernel on every device but those that it knows without Triton.
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
    """SGLang's preparation of a batch; where memory cannot be pinned, it pins none."""
    return (original if detect_device().pin_memory else unpinned(original))(batch, *args, **kwargs)


def memcpy(
    original: Callable[..., None], dst: Tensor, src: Tensor, dim: int, offset: Tensor, sz: Tensor, offset_src: bool
) -> None:
    """Copy ``sz`` rows from ``src`` to ``dst``, which begin at ``offset`` in one of them."""
    from sglang.srt.layers.dp_attention import memcpy_cpu

    (memcpy_cpu if why_unserved() else original)(dst, src, dim, offset, sz, offset_src)
