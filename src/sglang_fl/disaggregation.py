"""Prefill and decode in engines of their own, without CUDA: SGLang hands over pages in the step's own order.

It would copy the numbers of pages into pinned memory and wait for an event of ``torch.cuda`` in another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

BACKEND = "mooncake"
"""The library that carries pages between processes on a CPU; SGLang makes it of ``mooncake_tcp``, too."""


def send_kv_chunk(original: Callable[..., None], scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    """SGLang's hand-over of a request's pages."""
    if not torch.cuda.is_available():
        req.disagg_kv_sender.supports_host_tensor_indices = False
    original(scheduler, req, *args, **kwargs)
