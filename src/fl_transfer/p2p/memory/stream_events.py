"""Points of a device's work that another stream can wait for."""

from __future__ import annotations

import torch
from torch import Tensor

from .pool import queues

StreamEvent = torch.cuda.Event | None
"""A point of a stream's work; ``None`` if work is done when its call returns."""


def record_event(data: Tensor) -> StreamEvent:
    """Record the present point of this thread's stream on the tensor's device."""
    if not queues(data):
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(data.device))
    return event
